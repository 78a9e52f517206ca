"""Convert messages between OpenAI's chat API, which programs use, and the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.messages import content_text
from stream.errors import EngineRefusedError
from stream.records import Message
from workers.rollout.messages import assistant_message, call_id, storable_arguments, tool_call_entry
from workers.rollout.tool_formats.parsing import ParsedTurn


@dataclass(slots=True)
class Reply:
    """A turn of the model, as the answer to the program."""

    message: Message
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


def parse_messages(messages: object) -> list[Message]:
    """Convert OpenAI's messages to the form that chat templates expect: arguments decoded, text in one piece.

    Calls get new ids in their order, which all templates accept.

    Raises:
        EngineRefusedError: the messages are malformed.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise EngineRefusedError("messages: a list with at least one message expected")
    known: dict[Any, tuple[str, str]] = {}
    plain: list[Message] = []
    count = 0
    for message in messages:
        role = "system" if message.get("role") == "developer" else message.get("role")
        if not isinstance(role, str):
            raise EngineRefusedError("role: a text expected")
        converted: Message = {"role": role, "content": _content(message.get("content"))}
        calls = []
        for call in _calls(message):
            count += 1
            name = call["function"]["name"]
            calls.append(_call(count, name, call["function"].get("arguments")))
            known[_id(call)] = call_id(count), name
        if calls:
            converted["tool_calls"] = calls
        if role == "tool" and (answered := _id(message, "tool_call_id")) in known:
            converted["tool_call_id"], converted["name"] = known[answered]
        plain.append(converted)
    return plain


def parse_tools(tools: object) -> list[dict[str, Any]] | None:
    """Check a request's tools; None if it has none.

    Raises:
        EngineRefusedError: they are not functions.
    """
    if not tools:
        return None
    if isinstance(tools, list) and all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        return tools
    raise EngineRefusedError("tools: a list of functions expected")


def _calls(message: Mapping[str, Any]) -> list[Any]:
    try:
        return [call for call in message.get("tool_calls") or [] if isinstance(call["function"]["name"], str)]
    except (TypeError, KeyError) as error:
        raise EngineRefusedError(f"tool_calls: not function calls: {error}") from error


def _id(record: Mapping[str, Any], name: str = "id") -> str:
    """Return the id of a call, as text."""
    value = record.get(name)
    if not isinstance(value, str | int | None):
        raise EngineRefusedError(f"{name}: a text expected")
    return str(value)


def _content(content: object) -> Any:
    """Join text parts; content with other parts stays a list."""
    if content is None:
        return ""
    if not isinstance(content, str | list) or not all(isinstance(part, str | dict) for part in content):
        raise EngineRefusedError("content: a text or a list of parts expected")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return content_text(content)
    return content


def to_template_message(turn: ParsedTurn, before: Sequence[Message]) -> Message:
    """Return a turn as `parse_messages` will return it when the program sends it back.

    Args:
        turn: of the model.
        before: the conversation so far.
    """
    first = 1 + sum(len(message.get("tool_calls", ())) for message in before)
    calls = (_call(i, call.name, json.dumps(call.arguments)) for i, call in enumerate(turn.calls, first))
    return assistant_message(turn.content, calls)


def to_openai_message(reply: Reply) -> Message:
    """Return a turn as OpenAI's message, with a call's arguments as text."""
    message = dict(reply.message)
    if "tool_calls" in message:
        message["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _text(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _call(number: int, name: str, arguments: object) -> dict[str, Any]:
    """Return a call with its arguments decoded if they are JSON that a record can hold, otherwise as text."""
    decoded = arguments
    if isinstance(arguments, str):
        try:
            decoded = storable_arguments(json.loads(arguments), arguments)
        except (ValueError, RecursionError):
            decoded = arguments
    return tool_call_entry(call_id(number), name, decoded)
