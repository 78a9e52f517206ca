"""The text of chat messages, and a prompt and its completion as one conversation."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stream.records import Message


def content_text(content: Any) -> str:
    """Return the text of a message's content: a string, or the text of its content parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")


def messages_text(messages: Sequence[Message]) -> str:
    """Return the text of messages, joined by line breaks; empty messages are skipped."""
    return "\n".join(filter(None, (content_text(message.get("content")) for message in messages)))


def is_empty_prompt(messages: Sequence[Message]) -> bool:
    """Return whether messages ask the model nothing: besides a system message, none has content or tool calls."""
    asked = [message for message in messages if message.get("role") != "system"]
    return not any(_has_content(message) for message in asked)


def _has_content(message: Message) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content or message.get("tool_calls"))


def last_assistant_text(completion: Any) -> str:
    """Return the text of the model's last message in a conversation; a plain string is returned whole.

    Raises:
        TypeError: the completion is neither a string nor a list of messages.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list | tuple):
        raise TypeError(f"a completion is a string or a list of messages, not {type(completion).__name__}")
    return messages_text([message for message in completion if message.get("role") == "assistant"][-1:])


def answer_text(text: str, delimiters: Sequence[str]) -> str:
    """Return what follows a message's reasoning, after the last delimiter in it; without reasoning, the whole text.

    Args:
        text: the message.
        delimiters: texts that end reasoning, such as `</think>`. A message that begins with the opening tag, which has
            no slash, and does not end its reasoning has no answer.
    """
    ends = [found + len(delimiter) for delimiter in delimiters if (found := text.rfind(delimiter)) >= 0]
    if ends:
        return text[max(ends) :]
    openings = tuple(delimiter.replace("/", "", 1) for delimiter in delimiters if "/" in delimiter)
    return "" if text.lstrip().startswith(openings) else text


def build_conversation(prompt: Any, completion: Any) -> list[Message]:
    """Join prompt and completion into one list of messages in OpenAI's form.

    Args:
        prompt: messages, or a string, which becomes a user message.
        completion: messages, or a string, which becomes an assistant message.

    Example:
        >>> conversation("2 + 2?", "4")
        [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    """
    return [*_as_messages(prompt, "user"), *_as_messages(completion, "assistant")]


def format_transcript(messages: Any) -> str:
    """Format messages as plain text, each under a line with its role; a string is returned unchanged."""
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
    """Write the arguments of tool calls as JSON text, as OpenAI's form requires; chat templates accept both."""
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
