"""A completion's messages, in OpenAI's form as chat templates take it: a call's arguments are an object."""

from collections.abc import Iterable
from typing import Any

import msgspec

from envs.contract import Observation
from stream.records import Message

_MAX_BRACKETS = 100
"""Arguments with more are kept as text in the record, which has to be readable whatever a model writes."""


def call_id(number: int) -> str:
    """A name for a conversation's call: nine letters and digits, which all templates take."""
    return f"call{number:05}"


def tool_call_entry(id_: str | None, name: str, arguments: object) -> dict[str, Any]:
    """A call within an assistant's message."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(content: str, calls: Iterable[dict[str, Any]]) -> Message:
    """What the model said, with its calls if it made any."""
    message: Message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": entries} if (entries := list(calls)) else {})


def tool_message(content: str | list[dict[str, Any]], call_id: str | None, name: str | None = None) -> Message:
    """What a call was answered."""
    named = {} if name is None else {"name": name}
    return {"role": "tool", **named, "tool_call_id": call_id, "content": content}


def storable_arguments(arguments: Any, raw: str) -> Any:
    """A copy of a call's arguments, or their text where a record could not hold them: deep nesting, huge integers."""
    if raw.count("[") + raw.count("{") > _MAX_BRACKETS:
        return raw
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(arguments))  # a tool may change what it is called with
    except (ValueError, OverflowError):
        return raw


def append_observation(messages: list[Message], observation: Observation) -> list[Message]:
    """The prompt with what `reset` returned appended to its last message; the prompt itself stays as it is."""
    if not observation:
        return messages
    last = dict(messages[-1])
    content = last.get("content") or ""
    if isinstance(content, str) and isinstance(observation, str):
        last["content"] = content + observation
    else:
        last["content"] = _parts(content) + _parts(observation)
    return [*messages[:-1], last]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content
