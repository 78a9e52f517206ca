"""Messages: the words in them, and a prompt and its completion as one conversation."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stream.records import Message


def content_text(content: Any) -> str:
    """The text of a message's content; of parts, what in them is text."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")


def messages_text(messages: Sequence[Message]) -> str:
    """The text of messages, a line for each; of content parts, those that are text."""
    return "\n".join(filter(None, (content_text(message.get("content")) for message in messages)))


def last_assistant_text(completion: Any) -> str:
    """What the model said last: of a conversation its last message, of a plain text all of it.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list | tuple):
        raise TypeError(f"a completion is a string or a list of messages, not {type(completion).__name__}")
    return messages_text([message for message in completion if message.get("role") == "assistant"][-1:])


def build_conversation(prompt: Any, completion: Any) -> list[Message]:
    """The whole conversation: what the model was shown, and what followed.

    Args:
        prompt: a string, which becomes a message of the user, or messages.
        completion: a string, which becomes a message of the assistant, or messages.

    Example:
        >>> conversation("2 + 2?", "4")
        [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    """
    return [*_as_messages(prompt, "user"), *_as_messages(completion, "assistant")]


def format_transcript(messages: Any) -> str:
    """Messages as text for a reader; a string as it is."""
    if isinstance(messages, str):
        return messages
    if len(messages) == 1 and isinstance(messages[0].get("content"), str) and not messages[0].get("tool_calls"):
        return str(messages[0]["content"])
    return "\n\n".join(f"[{message.get('role')}]\n{_message_text(message)}" for message in messages)


def _as_messages(value: Any, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [_normalize_message(message) for message in value]


def _normalize_message(message: Mapping[str, Any]) -> Message:
    """Arguments of tool calls as the text that OpenAI's form wants; templates take either."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {
        **message,
        "content": message.get("content") or "",
        "tool_calls": [_normalize_tool_call(call, i) for i, call in enumerate(calls)],
    }


def _normalize_tool_call(call: Mapping[str, Any], position: int) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(call.get("id") or f"call_{position}"), "type": "function", "function": function}


def _message_text(message: Mapping[str, Any]) -> str:
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [content_text(message.get("content")), *calls]))
