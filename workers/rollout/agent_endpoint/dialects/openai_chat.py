"""OpenAI's chat completions.

The reasoning of a turn stays in its content, as it was sampled. Some clients take it out and send it back beside the
content; the recorder joins the two again.
"""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from stream.records import Message
from workers.rollout.agent_endpoint.dialects.base import (
    IDEMPOTENCY_KEY,
    MODEL_NAME,
    count,
    event,
    is_retry,
    items,
    refuse_prefill,
    text,
    texts,
)
from workers.rollout.agent_endpoint.fields import check_fields
from workers.rollout.agent_endpoint.messages import MessageBuilder
from workers.rollout.agent_endpoint.neutral import (
    ContextOverflowError,
    ModelReply,
    ModelRequest,
    RequestRefusedError,
)
from workers.rollout.agent_endpoint.request_source import source_of

_FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}
_TYPES = {400: "invalid_request_error", 404: "invalid_request_error"}


class OpenAIChat:
    """`POST /v1/chat/completions`."""

    name: ClassVar[str] = "chat"
    ping: ClassVar[bytes] = b": ping\n\n"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        """Read a request."""
        unused = check_fields(body, self.name)
        messages = parse_messages(body.get("messages"))
        refuse_prefill(messages, "messages")
        return ModelRequest(
            messages=messages,
            tools=None if body.get("tool_choice") == "none" else parse_tools(body.get("tools")),
            max_tokens=count(body, "max_completion_tokens", "max_tokens"),
            stop=texts(body.get("stop"), "stop"),
            one_call=body.get("parallel_tool_calls") is False,
            streams=bool(body.get("stream")),
            includes_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            source=source_of(headers),
            is_retry=is_retry(headers),
            idempotency_key=headers.get(IDEMPOTENCY_KEY, ""),
            unused=unused,
        )

    def body(self, reply: ModelReply, _: ModelRequest) -> dict[str, Any]:
        """Return a chat completion."""
        choice = {
            "index": 0,
            "message": to_openai_message(reply.message),
            "finish_reason": _FINISH[reply.finish],
            "logprobs": None,
        }
        return _head(reply, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}

    def events(self, reply: ModelReply, request: ModelRequest) -> Iterator[bytes]:
        """Yield the message, each call, why it ended, and the numbers of tokens if the program asked for them."""
        head = _head(reply, "chat.completion.chunk") | ({"usage": None} if request.includes_usage else {})
        message = to_openai_message(reply.message)
        calls = message.pop("tool_calls", [])
        deltas = [message, *({"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls))]
        for delta in deltas:
            yield event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield event(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": _FINISH[reply.finish]}]})
        if request.includes_usage:
            yield event(head | {"choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, error: Exception) -> dict[str, Any]:
        """Return OpenAI's error; the code of a context that is too long is one that programs look for."""
        return {"error": openai_error(status, error)}

    def error_event(self, status: int, error: Exception) -> bytes:
        """Return a chunk with the error."""
        return event(self.error(status, error))


def openai_error(status: int, error: Exception) -> dict[str, Any]:
    """Return the error of both of OpenAI's dialects."""
    message, code = str(error), None
    if isinstance(error, ContextOverflowError):
        code = "context_length_exceeded"
        message = (
            f"This model's maximum context length is {error.most} tokens. However, your messages resulted in "
            f"{error.tokens} tokens."
        )
    field = error.field or None if isinstance(error, RequestRefusedError) else None
    return {"message": message, "type": _TYPES.get(status, "server_error"), "param": field, "code": code}


def parse_messages(messages: object) -> list[Message]:
    """Convert OpenAI's messages to the form that chat templates expect: arguments decoded, text in one piece.

    Raises:
        RequestRefusedError: the messages are malformed.
    """
    builder = MessageBuilder()
    for message in items(messages, "messages"):
        role = text(message, "role", "messages")
        if role == "assistant":
            calls = [_call(call) for call in items(message.get("tool_calls"), "messages")]
            reasoning, content = _reasoning_apart(message)
            builder.add_turn(content, calls, reasoning)
        elif role == "tool":
            builder.add_result(str(message.get("tool_call_id")), message.get("content"))
        else:
            builder.add(role, message.get("content"))
    if not builder.messages:
        raise RequestRefusedError("messages: a list with at least one message expected", "messages")
    return builder.messages


def _reasoning_apart(message: Mapping[str, Any]) -> tuple[str, object]:
    """Return the reasoning and the content of a turn whose client took the reasoning out of the content (LiteLLM)."""
    reasoning, content = message.get("reasoning_content"), message.get("content") or ""
    if not isinstance(reasoning, str) or not isinstance(content, str) or reasoning in content:
        return "", content
    return reasoning.strip(), content.lstrip()


def parse_tools(tools: object) -> list[dict[str, Any]] | None:
    """Check a request's tools; None if it has none."""
    for tool in items(tools, "tools"):
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            kind = tool.get("type", "without a type")
            raise RequestRefusedError(f"tools: a tool of type {kind!r} is no function with a name", "tools")
    return items(tools, "tools") or None


def _call(call: Mapping[str, Any]) -> tuple[str, str, object]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestRefusedError("messages: a call is not that of a function", "messages")
    return str(call.get("id")), text(function, "name", "messages"), function.get("arguments") or "{}"


def to_openai_message(message: Message) -> Message:
    """Return a turn as OpenAI's message, with a call's arguments as text."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        call | {"function": call["function"] | {"arguments": _written(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _written(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _head(reply: ModelReply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": MODEL_NAME}


def _usage(reply: ModelReply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
