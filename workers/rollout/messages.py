"""Make a completion's messages in OpenAI's form, with a call's arguments as an object, as chat templates expect."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from envs.call import call_signature, replace_surrogates
from envs.contract import Observation, Response, is_messages
from envs.messages import is_empty_prompt
from envs.rewards.parts import accepts_messages
from stream.records import Message

_MAX_BRACKETS = 100
"""Arguments with more brackets are recorded as text: deeply nested ones could make the record unreadable."""


def call_id(number: int) -> str:
    """Return the id of a conversation's n-th call: nine letters and digits, which all templates accept."""
    return f"call{number:05}"


def tool_call_entry(id_: str | None, name: str, arguments: object) -> dict[str, Any]:
    """Return one entry of an assistant message's `tool_calls`."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(content: str, calls: Iterable[dict[str, Any]]) -> Message:
    """Return a message of the model, with its calls if there are any."""
    message: Message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": entries} if (entries := list(calls)) else {})


def tool_message(content: str | list[dict[str, Any]], call_id: str | None, name: str | None = None) -> Message:
    """Return the message that answers a call."""
    named = {} if name is None else {"name": name}
    return {"role": "tool", **named, "tool_call_id": call_id, "content": content}


def storable_arguments(arguments: Any, raw: str) -> Any:
    """Return a copy of a call's arguments, or `raw`, their text, if a record cannot hold them.

    Deep nesting and huge integers cannot be recorded. It is a copy because a tool may change its arguments.
    """
    if raw.count("[") + raw.count("{") > _MAX_BRACKETS:
        return raw
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(arguments))
    except (ValueError, OverflowError):
        return raw


def append_observation(messages: list[Message], observation: Observation) -> list[Message]:
    """Return the prompt with what `reset` returned; the given messages stay unchanged.

    Text and content parts are appended to the last message. Messages with roles follow the prompt, and take the place
    of a last message without content, which `data.prompt = ""` makes. The system message that they start with replaces
    the prompt's.
    """
    if not observation:
        return messages
    if isinstance(observation, list) and is_messages(observation):
        return _append_messages(messages, observation)
    last = dict(messages[-1])
    content = last.get("content") or ""
    if isinstance(content, str) and isinstance(observation, str):
        last["content"] = content + observation
    else:
        last["content"] = _parts(content) + _parts(observation)
    return [*messages[:-1], last]


def _append_messages(messages: list[Message], observed: list[Message]) -> list[Message]:
    kept = messages[:-1] if is_empty_prompt(messages[-1:]) else messages
    if observed[0]["role"] != "system":
        return [*kept, *observed]
    return [observed[0], *(kept[1:] if kept and kept[0].get("role") == "system" else kept), *observed[1:]]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def response_arguments(respond: Callable[..., Any], text: str, messages: Sequence[Message]) -> dict[str, Any]:
    """Return the arguments of `respond`: the turn's text for its first parameter, and `messages` if it names them."""
    signature = call_signature(respond)
    names = signature.names if signature is not None else ()
    arguments: dict[str, Any] = {name: text for name in names[:1] if name != "messages"}
    if accepts_messages(respond):
        arguments["messages"] = copy.deepcopy(list(messages))
    return arguments


def to_messages(response: Response) -> list[Message] | None:
    """Return a response as messages; a text or content parts become a message of the user."""
    if response is None:
        return None
    if isinstance(response, list):
        # A copy, since the environment may change its own list later.
        content: list[Message] = msgspec.msgpack.decode(msgspec.msgpack.encode(response))
        return content if is_messages(content) else [{"role": "user", "content": content}]
    return [{"role": "user", "content": replace_surrogates(response)}]


def is_plain_data(value: object) -> bool:
    """Return whether a value is plain data, which a record can hold."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True
