"""One completion as turns to show: messages, tool calls with results and durations, reward parts at their turn."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from stream.records import Completion, Message, RewardPart, ToolRun
from workers.runs.transcript import content_text, describe_reward, format_call

FIRST: Final = 4
LAST: Final = 3
"""Messages at the beginning and the end of a long conversation that are shown at once."""
PAGE: Final = 40
"""Messages that are loaded at a time."""
MAX_CHARACTERS: Final = 2000
"""Of one message; the middle of a longer one is loaded when it is asked for."""


class ShownMessage(Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    number: int
    """Position in the conversation, from 0; the prompt's messages come first."""
    role: str
    text: str
    reasoning: str = ""
    calls: list[str] = field(default_factory=list)
    """Tool calls as in Python."""
    tool: str = ""
    """Name of the tool whose result this is."""
    seconds: float | None = None
    is_error: bool = False
    cause: str = ""
    """Where the tool raised or hung."""
    rewards: list[str] = field(default_factory=list)
    """Parts of the reward for this turn."""
    turn: int | None = None
    """Number of the model's turn, from 1."""
    is_prompt: bool = False
    omitted: int = 0
    """Characters of `text` that are left out after `head`."""
    tail: str = ""
    """The end of a text whose middle is left out."""


def conversation(completion: Completion) -> list[ShownMessage]:
    """Return all messages of a completion, whole."""
    shown = [_shown(number, message, is_prompt=True) for number, message in enumerate(completion.prompt_messages)]
    runs = iter(completion.tool_runs)
    names = _call_names(completion.messages)
    parts = [part for part in completion.parts if part.turn is not None]
    turn = 0
    for number, message in enumerate(completion.messages, len(shown)):
        if message.get("role") == "tool":
            name = str(message.get("name") or names.get(str(message.get("tool_call_id")), ""))
            shown.append(_tool_result(number, message, name, next(runs, None)))
            continue
        if message.get("role") == "assistant":
            turn += 1
        shown.append(_shown(number, message, turn=turn if message.get("role") == "assistant" else None, parts=parts))
    return shown


def shorten_message(message: ShownMessage) -> ShownMessage:
    """Leave out the middle of a long text."""
    text = message.text
    if len(text) <= MAX_CHARACTERS:
        return message
    head, tail = 2 * MAX_CHARACTERS // 3, MAX_CHARACTERS // 3
    return msgspec.structs.replace(message, text=text[:head], omitted=len(text) - head - tail, tail=text[-tail:])


def visible_parts(messages: Sequence[ShownMessage]) -> tuple[list[ShownMessage], int, list[ShownMessage]]:
    """Return the first messages, the number of those between, and the last ones."""
    if len(messages) <= FIRST + LAST + 1:
        return list(messages), 0, []
    return list(messages[:FIRST]), len(messages) - FIRST - LAST, list(messages[-LAST:])


def describe_part(part: RewardPart) -> str:
    """Return name, value and weight of a part of a reward, and why it is not measured."""
    weight = "" if part.weight == 1 else f", weight {part.weight:g}"
    detail = getattr(part.reward, "detail", "")
    return f"{part.name} {describe_reward(part.reward)}{weight}" + (f": {detail}" if detail else "")


def _shown(
    number: int,
    message: Message,
    *,
    turn: int | None = None,
    parts: Sequence[RewardPart] = (),
    is_prompt: bool = False,
) -> ShownMessage:
    calls = [format_call(call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    return ShownMessage(
        number=number,
        role=str(message.get("role", "?")),
        text=content_text(message.get("content")),
        reasoning=content_text(message.get("reasoning_content")),
        calls=calls,
        rewards=[describe_part(part) for part in parts if turn is not None and part.turn == turn - 1],
        turn=turn,
        is_prompt=is_prompt,
    )


def _tool_result(number: int, message: Message, name: str, run: ToolRun | None) -> ShownMessage:
    return ShownMessage(
        number=number,
        role="tool",
        text=content_text(message.get("content")),
        tool=name,
        seconds=run.seconds if run is not None and run.seconds else None,
        is_error=run is not None and run.is_error,
        cause=run.cause.short_headline if run is not None and run.cause is not None else "",
    )


def _call_names(messages: Sequence[Message]) -> dict[str, str]:
    calls: list[dict[str, Any]] = [c for m in messages for c in m.get("tool_calls") or [] if isinstance(c, dict)]
    return {str(call["id"]): str(call.get("function", call).get("name", "")) for call in calls if call.get("id")}
