"""Choose the format in which a model writes tool calls: by name, or from its chat template."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stream.errors import DataError, SettingsError
from stream.records import Message
from workers.rollout.chat.template import ChatTemplate, text_after_common_prefix
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.rollout.tool_formats.parsing import ToolFormat

_TAGS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "pythonic": "<|tool_call_start|>"}
"""Tags that identify the format of a template that only describes calls to the model."""
_NAME, _ARGUMENTS = "add_5f1c", {"first": 1, "second": "two"}
_ID = "call00001"


@dataclass(frozen=True, slots=True)
class ToolFormatChoice:
    """A format, and the reason for choosing it."""

    name: str
    format: ToolFormat
    reason: str


def choose_tool_format(name: str, template: ChatTemplate, tools: Sequence[dict[str, Any]] | None) -> ToolFormatChoice:
    """Return the format of that name, or for `auto` the one that parses what the template writes.

    The template renders a call, and each format tries to parse it back: the call, and nothing left over but what
    surrounds any answer (or less: R1's template omits the end of a turn with one call). If the template renders no
    calls, but describes them to the model, the one format counts whose tag occurs in that description.

    Args:
        name: value of `model.tool_format`.
        template: of the model.
        tools: schemas that the template renders, if any.

    Raises:
        SettingsError: `auto`, and no format parses what the template writes.
        DataError: `auto`, and the template cannot even render a user's message.
    """
    if name != "auto":
        return ToolFormatChoice(name, TOOL_FORMATS[name], "set by model.tool_format")
    shown = list(tools) if tools else None
    around = _text_around_answer(template, shown)
    texts = list(_render_calls(template, shown))
    for text in texts:
        for found, tool_format in TOOL_FORMATS.items():
            if _parses_back(tool_format, text, around):
                return ToolFormatChoice(found, tool_format, f"the chat template writes a call as {_shorten(text)!r}")
    if texts:
        raise SettingsError(
            f"no tool format reads what the chat template of {template.folder} writes, {_shorten(texts[0])!r}; "
            f"{_advice()}, or give the model a chat_template.jinja that writes one of them"
        )
    prompt = template.render([{"role": "user", "content": "u"}], shown, add_generation_prompt=False)
    tagged = [(found, tag) for found, tag in _TAGS.items() if tag in prompt]
    if len(tagged) == 1:
        ((found, tag),) = tagged
        reason = f"the chat template writes no calls, but describes {tag!r} to the model"
        return ToolFormatChoice(found, TOOL_FORMATS[found], reason)
    raise SettingsError(
        f"the chat template of {template.folder} neither writes tool calls nor describes them, so it does not show "
        f"how this model calls a tool; {_advice()}"
    )


def _advice() -> str:
    return f"set model.tool_format to what the model was trained to write: {', '.join(TOOL_FORMATS)}"


def _render_calls(template: ChatTemplate, tools: list[dict[str, Any]] | None) -> Iterator[str]:
    """Yield an assistant's call as the template writes it, in each form that it neither refuses nor leaves out."""
    question: Message = {"role": "user", "content": "u"}
    before = _try_render(template, [question], tools) or ""
    for content in ("", None):
        for arguments in (_ARGUMENTS, '{"first": 1, "second": "two"}'):
            function = {"name": _NAME, "arguments": arguments}
            call = {"id": _ID, "type": "function", "function": function}
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            text = _try_render(template, [question, answer], tools)
            if text is not None and _NAME in text:
                yield text_after_common_prefix(before, text)


def _text_around_answer(template: ChatTemplate, tools: list[dict[str, Any]] | None) -> str | None:
    """Return what the template writes around an assistant's text; None if it refuses one."""
    question: Message = {"role": "user", "content": "u"}
    text = _try_render(template, [question, {"role": "assistant", "content": _NAME}], tools)
    if text is None:
        return None
    return text_after_common_prefix(_try_render(template, [question], tools) or "", text).replace(_NAME, "")


def _parses_back(tool_format: ToolFormat, text: str, around: str | None) -> bool:
    """Whether the format extracts the call from the text, and all of it."""
    parsed = tool_format.parse(text)
    is_whole = around is None or "".join(parsed.content.split()) in "".join(around.split())
    calls = [(call.name, call.arguments) for call in parsed.calls]
    return calls == [(_NAME, _ARGUMENTS)] and not parsed.errors and is_whole


def _try_render(template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]] | None) -> str | None:
    try:
        return template.render(messages, tools, add_generation_prompt=False)
    except DataError:
        return None


def _shorten(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:160]}…"
