"""Builds a conversation in the form of chat templates from the parts in which dialects send it."""

import json
from collections.abc import Sequence
from typing import Any

from envs.messages import content_text
from stream.records import Message
from workers.rollout.agent_endpoint.neutral import REASONING, RequestRefusedError
from workers.rollout.messages import assistant_message, call_id, storable_arguments, tool_call_entry, tool_message
from workers.rollout.tool_formats.parsing import ParsedTurn


class MessageBuilder:
    """Collects the messages of one request. Calls get new ids in their order, which all templates accept.

    Attributes:
        messages: the conversation so far.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._known: dict[str, tuple[str, str]] = {}
        self._calls = 0

    def add(self, role: str, content: object) -> None:
        """Append a message without calls; `developer` is `system` for chat templates."""
        self.messages.append({"role": "system" if role == "developer" else role, "content": merge_text(content)})

    def add_turn(self, content: object, calls: list[tuple[str, str, object]], reasoning: str = "") -> None:
        """Append a turn of the model.

        Args:
            content: its text.
            calls: the program's id, the name and the arguments of each call.
            reasoning: if the dialect keeps it apart.
        """
        entries = []
        for its_id, name, arguments in calls:
            self._calls += 1
            self._known[its_id] = call_id(self._calls), name
            entries.append(call_entry(self._calls, name, arguments))
        message = assistant_message(merge_text(content), entries)
        self.messages.append(message | {REASONING: reasoning} if reasoning else message)

    def add_result(self, its_id: str, content: object) -> None:
        """Append what a tool returned; without an id if its call is not in the conversation any more."""
        shown = merge_text(content)
        orphan: Message = {"role": "tool", "content": shown}
        self.messages.append(tool_message(shown, *self._known[its_id]) if its_id in self._known else orphan)


def turn_message(turn: ParsedTurn, before: Sequence[Message]) -> Message:
    """Return a turn of the model as it will be when the program sends it back.

    Args:
        turn: of the model.
        before: the conversation so far.
    """
    first = 1 + sum(len(message.get("tool_calls", ())) for message in before)
    calls = (call_entry(i, call.name, json.dumps(call.arguments)) for i, call in enumerate(turn.calls, first))
    return assistant_message(turn.content, calls)


def call_entry(number: int, name: str, arguments: object) -> dict[str, Any]:
    """Return the n-th call with its arguments decoded if they are JSON that a record can hold, otherwise as text."""
    decoded = arguments
    if isinstance(arguments, str):
        try:
            decoded = storable_arguments(json.loads(arguments), arguments)
        except (ValueError, RecursionError):
            decoded = arguments
    else:
        decoded = storable_arguments(arguments, json.dumps(arguments))
    return tool_call_entry(call_id(number), name, decoded)


def merge_text(content: object) -> Any:
    """Join parts of text; content with other parts stays a list.

    Raises:
        RequestRefusedError: it is neither text nor a list of parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, str | dict) for part in content):
        raise RequestRefusedError("content: a text or a list of parts expected")
    if all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return content_text(content)
    return content
