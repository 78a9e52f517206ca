"""Which format a model writes tool calls in: by name, or as its chat template says.

A format is an object with `parse` (see `ToolFormat`); `TOOL_FORMATS` finds it by the name in `model.tool_format`.
Whatever a model writes is its own business: parsing never raises, a malformed call becomes an error text that goes back
to the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stream.errors import DataError, SettingsError
from stream.records import Message
from workers.rollout.chat.template import ChatTemplate, text_after_common_prefix
from workers.rollout.tool_formats.deepseek import DeepSeek
from workers.rollout.tool_formats.hermes import Hermes
from workers.rollout.tool_formats.llama3_json import Llama3Json
from workers.rollout.tool_formats.mistral import Mistral
from workers.rollout.tool_formats.parsed_turn import ToolFormat
from workers.rollout.tool_formats.pythonic import Pythonic

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": Hermes(),
        "mistral": Mistral(),
        "deepseek": DeepSeek(),
        "pythonic": Pythonic(),
        "llama3_json": Llama3Json(),
    }
)
"""Formats by the name that `model.tool_format` gives them; those with tags of their own come first."""

_TAGS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "pythonic": "<|tool_call_start|>"}
"""By these a template that only tells of calls is recognised."""
_NAME, _ARGUMENTS = "add_5f1c", {"first": 1, "second": "two"}
_ID = "call00001"


@dataclass(frozen=True, slots=True)
class ToolFormatChoice:
    """A format, and why it was taken."""

    name: str
    format: ToolFormat
    reason: str


def choose_tool_format(name: str, template: ChatTemplate, tools: Sequence[dict[str, Any]] | None) -> ToolFormatChoice:
    """The format of that name, or for `auto` the one that reads what the template writes.

    The template is given a call to write, and every format tries to read it back: the call, and nothing left over but
    what stands around any answer (or less: R1's leaves out the end of a turn with one call). A template that writes no
    calls may still tell the model how to: then the one format counts whose tag stands in what it says to the model.

    Args:
        name: as in `model.tool_format`.
        template: of the model.
        tools: schemas that the template is shown, if it is shown any.

    Raises:
        SettingsError: `auto`, and no format reads what the template writes.
    """
    if name != "auto":
        return ToolFormatChoice(name, TOOL_FORMATS[name], "model.tool_format says so")
    shown = list(tools) if tools else None
    around = _text_around_answer(template, shown)
    texts = list(_render_calls(template, shown))
    for written in texts:
        for found, form in TOOL_FORMATS.items():
            if _parses_back(form, written, around):
                return ToolFormatChoice(found, form, f"the chat template writes a call as {_shorten(written)!r}")
    if texts:
        raise SettingsError(
            f"no tool format reads what the chat template of {template.folder} writes, {_shorten(texts[0])!r}; "
            f"{_advice()}, or give the model a chat_template.jinja that writes one of them"
        )
    told = _try_render(template, [{"role": "user", "content": "u"}], shown) or ""
    tagged = [(found, tag) for found, tag in _TAGS.items() if tag in told]
    if len(tagged) == 1:
        ((found, tag),) = tagged
        return ToolFormatChoice(
            found, TOOL_FORMATS[found], f"the chat template writes no calls, but tells the model of {tag!r}"
        )
    raise SettingsError(
        f"the chat template of {template.folder} writes no tool calls and tells the model of none, so it cannot "
        f"say how this model calls a tool; {_advice()}"
    )


def _advice() -> str:
    return f"set model.tool_format to what the model was trained to write: {', '.join(TOOL_FORMATS)}"


def _render_calls(template: ChatTemplate, tools: list[dict[str, Any]] | None) -> Iterator[str]:
    """What the template makes of an assistant's call, in each form that it neither refuses nor leaves out."""
    question: Message = {"role": "user", "content": "u"}
    before = _try_render(template, [question], tools) or ""
    for content in ("", None):
        for arguments in (_ARGUMENTS, '{"first": 1, "second": "two"}'):
            function = {"name": _NAME, "arguments": arguments}
            call = {"id": _ID, "type": "function", "function": function}
            text = _try_render(
                template, [question, {"role": "assistant", "content": content, "tool_calls": [call]}], tools
            )
            if text is not None and _NAME in text:
                yield text_after_common_prefix(before, text)


def _text_around_answer(template: ChatTemplate, tools: list[dict[str, Any]] | None) -> str | None:
    """What the template writes around an assistant's answer of text; None where it refuses one."""
    question: Message = {"role": "user", "content": "u"}
    text = _try_render(template, [question, {"role": "assistant", "content": _NAME}], tools)
    return (
        None
        if text is None
        else text_after_common_prefix(_try_render(template, [question], tools) or "", text).replace(_NAME, "")
    )


def _parses_back(form: ToolFormat, written: str, around: str | None) -> bool:
    """Whether the format takes the call, and all of it, out of the text."""
    read = form.parse(written)
    whole = around is None or "".join(read.content.split()) in "".join(around.split())
    return [(call.name, call.arguments) for call in read.calls] == [(_NAME, _ARGUMENTS)] and not read.errors and whole


def _try_render(template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]] | None) -> str | None:
    try:
        return template.render(messages, tools, add_generation_prompt=False)
    except DataError:
        return None


def _shorten(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:160]}…"
