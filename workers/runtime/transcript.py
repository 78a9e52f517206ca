"""Render a completion as lines of text: the conversation by speaker, tool calls, reward, validity.

::

    user       17 times 3, plus 4?
    assistant  I multiply first.
               multiply(a=17, b=3)
    tool       51                                       <- multiply, 2.1 ms
    assistant  Answer: 55
    reward     1
               exact_answer 1
    ended      finished; 2 turns, 1 tool call, 31 tokens sampled, 0.8 s

What a model or a tool wrote is escaped, so that it cannot change the terminal's state or hide text.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from rich.cells import cell_len, chop_cells
from rich.text import Text

from stream.records import Completion, Message, RewardPart, Row, ToolRun
from stream.validity import DropReason, Measured, Reward, Unmeasured

LABEL_WIDTH: Final = 11
_MIN_TEXT_WIDTH = 20
_TAB = "    "
_WORDS: Final = re.compile(r"\s*\S+")
_HARMLESS_FORMAT: Final = frozenset("\u200c\u200d")  # joiners of emoji and of several scripts
_ESCAPED_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_STYLES: Final = {
    "system": ("magenta", "dim"),
    "user": ("blue", ""),
    "assistant": ("cyan", ""),
    "tool": ("bright_black", "dim"),
    "tool error": ("yellow", "yellow"),
    "invalid": ("red", "red"),
    "reward": ("green", ""),
    "ended": ("bright_black", "bright_black"),
    "state": ("magenta", ""),
    "trainer": ("bright_black", "bright_black"),
}
"""Styles of label and text, by label."""

_WHY_DROPPED: Final[dict[str, str]] = {
    DropReason.NO_VALID_ROW: "No completion is valid.",
    DropReason.MIN_VALID_ROWS: "Fewer completions are valid than filter.min_valid_rows requires.",
    DropReason.ZERO_VARIANCE: "All valid completions have the same reward, so none is better than another "
    "(filter.zero_variance).",
    DropReason.SINGLETON: 'Only one completion is valid (algorithm.single_sample_policy = "drop").',
    DropReason.NO_BASELINE: "The greedy completion, whose reward is the baseline, has none.",
    DropReason.DIFFICULTY: "The mean reward is outside filter.mean_reward_range.",
    DropReason.ADVANTAGE: "The largest advantage is outside filter.advantage_range.",
    DropReason.GRADIENT_NOT_FINITE: "The gradient of its step was not finite, so the step was skipped.",
}

DecodeRow = Callable[[Row], tuple[str, str]]
"""Returns the text of a row's prompt, and of the tokens after it."""


class TranscriptLine(NamedTuple):
    """One line of a transcript."""

    label: str
    """The speaker, or what the line is about; empty for a further line of the same speaker."""
    text: str
    kind: str
    """The label of the first line that this one belongs to; chooses the color."""

    def __str__(self) -> str:
        return f"{self.label:<{LABEL_WIDTH}}{self.text}".rstrip()

    def rich_text(self) -> Text:
        """Return the line with its colors."""
        label_style, text_style = _STYLES.get(self.kind, ("", ""))
        text_style = "bold" if self.kind == "reward" and self.label else text_style
        line = Text(no_wrap=True, overflow="ignore")
        line.append(f"{self.label:<{LABEL_WIDTH}}", label_style)
        line.append(self.text, text_style)
        line.rstrip()
        return line


def completion_lines(
    completion: Completion, *, width: int = 100, max_characters: int = 0, decode: DecodeRow | None = None
) -> list[TranscriptLine]:
    """Render a completion.

    Args:
        completion: the completion.
        width: columns that a line may fill.
        max_characters: of one message; the middle of a longer one is left out. 0: no limit.
        decode: turns tokens to text, for completions without messages.
    """
    paragraphs = list(_conversation(completion, decode))
    paragraphs += _reward_paragraphs(completion)
    paragraphs.append(("ended", describe_end(completion)))
    return [
        line
        for label, text in paragraphs
        for line in wrapped_lines(label, shorten(text, max_characters) if max_characters else text, width)
    ]


def wrapped_lines(label: str, text: str, width: int) -> Iterator[TranscriptLine]:
    """Yield the lines of a paragraph, escaped, each in the columns behind the label."""
    columns = max(_MIN_TEXT_WIDTH, width - LABEL_WIDTH)
    shown = label
    for line in escape_controls(text).split("\n"):
        for part in _wrap_line(line, columns):
            yield TranscriptLine(shown, part, label)
            shown = ""


def compact_lines(completion: Completion, *, width: int = 100, max_lines: int = 16) -> list[TranscriptLine]:
    """Render a completion in at most `max_lines` lines: no system message, long messages shortened."""
    short = msgspec.structs.replace(
        completion, prompt_messages=[m for m in completion.prompt_messages if m.get("role") != "system"]
    )
    lines = completion_lines(short, width=width, max_characters=3 * width)
    if len(lines) <= max_lines:
        return lines
    head = max_lines // 2
    tail = max_lines - head - 1
    gap = TranscriptLine("", f"… {len(lines) - head - tail} lines …", "ended")
    return [*lines[:head], gap, *lines[-tail:]]


def escape_controls(text: str) -> str:
    r"""Return the text with all characters visible: control and format characters as `\x1b`, `\u202e`.

    Line ends stay; a tab becomes blanks.
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(_visible(character) for character in text)


def describe_end(completion: Completion) -> str:
    """Describe how an episode ended, and what it used, in one line."""
    end = f"truncated ({completion.truncated})" if completion.truncated else "finished"
    if completion.failure is not None:
        end = f"failed ({completion.failure.reason})"
    calls = completion.tool_calls
    errors = f" ({_count(completion.tool_errors, 'error')})" if completion.tool_errors else ""
    sampled = sum(row.sampled_count for row in completion.rows)
    used = [
        _count(completion.turns, "turn"),
        *([f"{_count(calls, 'tool call')}{errors}"] if calls or errors else []),
        *([f"{_count(sampled, 'token')} sampled"] if completion.rows or not completion.turns else []),
        *([versions] if (versions := describe_versions(completion)) else []),
        *([format_seconds(total)] if (total := completion.seconds.get("total")) else []),
    ]
    return f"{end}; {', '.join(used)}"


def describe_versions(completion: Completion) -> str:
    """Return the policy versions that sampled the completion: `version 7`, `versions 7-8`; empty without any."""
    versions = [span.version for row in completion.rows for span in row.spans]
    if not versions:
        return ""
    low, high = min(versions), max(versions)
    return f"version {low}" if low == high else f"versions {low}-{high}"


def describe_reward(reward: Reward | None) -> str:
    """Describe a reward in a few words: `0.5`, `unmeasured (timeout)`, `not scored`."""
    match reward:
        case None:
            return "not scored"
        case Measured(value, reason):
            return f"{value:g}" + (f" (could not be judged: {reason})" if reason else "")
        case Unmeasured(reason):
            return f"unmeasured ({reason})"


def invalid_reason(completion: Completion) -> str:
    """Return why a completion is invalid, with the detail; empty if it is valid, or not scored yet."""
    if (failure := completion.failure) is not None:
        return f"the episode failed ({failure.reason})" + (f": {failure.detail}" if failure.detail else "")
    if isinstance(reward := completion.reward, Unmeasured):
        return f"the reward is unmeasured ({reward.reason})" + (f": {reward.detail}" if reward.detail else "")
    return ""


def describe_outcome(outcome: str) -> str:
    """Return why a group ended without being trained on, as a sentence; empty if there is no more to say.

    Args:
        outcome: `trained`, `dropped:REASON` or `unfinished`.
    """
    return _WHY_DROPPED.get(outcome.removeprefix("dropped:"), "")


def shorten(text: str, max_characters: int) -> str:
    """Leave out the middle of a text that is longer than `max_characters`."""
    if len(text) <= max_characters:
        return text
    tail = max_characters // 3
    head = max_characters - tail
    return f"{text[:head]} … {len(text) - head - tail:,} characters … {text[-tail:]}"


def format_seconds(seconds: float) -> str:
    """Format a short duration: `0.4 ms`, `12 ms`, `3.4 s`, `75 s`."""
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def format_call(call: dict[str, Any]) -> str:
    """Format one entry of `tool_calls` like a call in Python: `add(a=2, b="x")`."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, dict):
        inside = ", ".join(f"{name}={_as_json(value)}" for name, value in arguments.items())
    else:
        inside = str(arguments)
    return f"{function.get('name', '?')}({inside})"


def content_text(content: object) -> str:
    """Return a message's content as text; a part that is not text becomes a note such as `[image_url]`."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return _as_json(content)
    return "\n".join(
        str(part["text"]) if isinstance(part, dict) and isinstance(part.get("text"), str) else f"[{_part_kind(part)}]"
        for part in content
    )


def _conversation(completion: Completion, decode: DecodeRow | None) -> Iterator[tuple[str, str]]:
    """Yield label and text of each paragraph of the conversation."""
    if not completion.messages and decode is not None and completion.rows:
        yield from _decoded_rows(completion.rows, decode)
        return
    for message in completion.prompt_messages:
        yield from _message_paragraphs(message)
    runs = iter(completion.tool_runs)
    names = call_names(completion.messages)
    for message in completion.messages:
        if message.get("role") == "tool":
            yield _tool_paragraph(message, names, next(runs, None))
        else:
            yield from _message_paragraphs(message)


def _decoded_rows(rows: Sequence[Row], decode: DecodeRow) -> Iterator[tuple[str, str]]:
    for row in rows:
        prompt, text = decode(row)
        yield "prompt", prompt
        yield "sampled", text


def _message_paragraphs(message: Message) -> Iterator[tuple[str, str]]:
    role = str(message.get("role", "?"))
    label = role if len(role) < LABEL_WIDTH else f"{role[: LABEL_WIDTH - 2]}…"
    calls = [format_call(call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    reasoning = message.get("reasoning_content")
    paragraphs = [content_text(reasoning), content_text(message.get("content"))] if reasoning else []
    text = "\n".join(filter(None, paragraphs)) if paragraphs else content_text(message.get("content"))
    yield label, "\n".join([*([text] if text or not calls else []), *(f"→ {call}" for call in calls)])


def _tool_paragraph(message: Message, names: dict[str, str], run: ToolRun | None) -> tuple[str, str]:
    """Return a tool's result, with the call's name and duration."""
    name = message.get("name") or names.get(str(message.get("tool_call_id")), "")
    about = [str(name)] if name else []
    if run is not None and run.seconds:
        about.append(format_seconds(run.seconds))
    text = content_text(message.get("content"))
    return ("tool error" if run is not None and run.is_error else "tool"), text + (
        f"  ← {', '.join(about)}" if about else ""
    )


def call_names(messages: Iterable[Message]) -> dict[str, str]:
    """Return the tools' names by the ids of their calls."""
    calls = (call for m in messages for call in m.get("tool_calls") or [] if isinstance(call, dict))
    return {str(call.get("id")): str(call.get("function", call).get("name", "")) for call in calls if call.get("id")}


def _reward_paragraphs(completion: Completion) -> list[tuple[str, str]]:
    found = [("reward", "\n".join([describe_reward(completion.reward), *map(_part_text, completion.parts)]))]
    if why := invalid_reason(completion):
        found.append(("invalid", why))
    return found


def _part_text(part: RewardPart) -> str:
    weight = "" if part.weight == 1 else f", weight {part.weight:g}"
    turn = "" if part.turn is None else f" (turn {part.turn + 1})"
    detail = getattr(part.reward, "detail", "")
    return f"{part.name}{turn} {describe_reward(part.reward)}{weight}" + (f": {detail}" if detail else "")


def _wrap_line(line: str, columns: int) -> list[str]:
    """Return the line in parts of at most `columns` cells, broken between words; a longer word is broken anywhere."""
    parts = [""]
    for word in _WORDS.findall(line.rstrip()):
        if parts[-1] and cell_len(parts[-1] + word) > columns:
            parts.append("")
        start = parts.pop()
        parts += chop_cells(start + (word if start or not parts else word.lstrip()), columns)
    return parts or [""]


def _visible(character: str) -> str:
    if character == "\n" or character in _HARMLESS_FORMAT:
        return character
    if character == "\t":
        return _TAB
    if unicodedata.category(character) not in _ESCAPED_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")


def _part_kind(part: object) -> str:
    return str(part.get("type", "part")) if isinstance(part, dict) else "part"


def _as_json(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return str(value)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
