"""Anthropic's Messages. Reasoning is a block of its own, which programs send back as it was."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from workers.rollout.agent_endpoint.dialects.base import (
    IDEMPOTENCY_KEY,
    MODEL_NAME,
    count,
    event,
    function,
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

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
_TYPES = {400: "invalid_request_error", 404: "not_found_error", 529: "overloaded_error"}
_BILLING = "x-anthropic-billing-header"
"""Beginning of a block of the system message that changes with the first user message and tells the model nothing."""
_OF_THE_VENDOR = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp")
"""Beginnings of the types of tools that the vendor runs itself."""


class AnthropicMessages:
    """`POST /v1/messages`."""

    name: ClassVar[str] = "messages"
    ping: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        """Read a request; `max_tokens` may be missing, as in one that only counts tokens."""
        unused = check_fields(body, self.name)
        builder = MessageBuilder()
        if (system := body.get("system")) is not None:
            builder.add("system", system if isinstance(system, str) else _system_parts(system))
        conversation = items(body.get("messages"), "messages")
        for message in conversation:
            _add_message(builder, message)
        if not conversation:
            raise RequestRefusedError("messages: a list with at least one message expected", "messages")
        refuse_prefill(builder.messages, "messages")
        tools, left_out = _parse_tools(body.get("tools"))
        choice = body.get("tool_choice") or {}
        return ModelRequest(
            messages=builder.messages,
            tools=None if choice.get("type") == "none" else tools or None,
            max_tokens=count(body, "max_tokens"),
            stop=texts(body.get("stop_sequences"), "stop_sequences"),
            one_call=choice.get("disable_parallel_tool_use") is True,
            streams=bool(body.get("stream")),
            source=source_of(headers),
            is_retry=is_retry(headers),
            idempotency_key=headers.get(IDEMPOTENCY_KEY, ""),
            unused=(*unused, *left_out),
        )

    def body(self, reply: ModelReply, _: ModelRequest) -> dict[str, Any]:
        """Return a message."""
        return _head(reply) | {"content": _blocks(reply), "stop_reason": _STOP_REASONS[reply.finish]}

    def events(self, reply: ModelReply, _: ModelRequest) -> Iterator[bytes]:
        """Yield the beginning, each block, and the end."""
        head = _head(reply)
        yield _event("message_start", message=head | {"usage": head["usage"] | {"output_tokens": 0}})
        for index, block in enumerate(_blocks(reply)):
            yield _event("content_block_start", index=index, content_block=_empty(block))
            for delta in _deltas(block):
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ending = {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": None}
        yield _event("message_delta", delta=ending, usage=head["usage"])
        yield _event("message_stop")

    def error(self, status: int, error: Exception) -> dict[str, Any]:
        """Return Anthropic's error; Claude Code reads the two numbers of a prompt that is too long."""
        message = str(error)
        if isinstance(error, ContextOverflowError):
            message = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
        return {"type": "error", "error": {"type": _TYPES.get(status, "api_error"), "message": message}}

    def error_event(self, status: int, error: Exception) -> bytes:
        """Return the same as an event."""
        return event(self.error(status, error), "error")


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name} | data, name)


def _add_message(builder: MessageBuilder, message: Mapping[str, Any]) -> None:
    role, content = text(message, "role", "messages"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else items(content, "messages")
    if role == "assistant":
        _add_turn(builder, blocks)
        return
    if role not in ("user", "system"):
        raise RequestRefusedError(f"messages: {role!r} is no role of a message", "messages")
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            parts.append(_part(block))
            continue
        if parts:
            builder.add(role, parts)
            parts = []
        result = block.get("content")
        shown = result if isinstance(result, str) else [_part(part) for part in items(result, "messages")]
        builder.add_result(text(block, "tool_use_id", "messages"), shown)
    if parts or not blocks:
        builder.add(role, parts)


def _add_turn(builder: MessageBuilder, blocks: list[dict[str, Any]]) -> None:
    reasoning, parts, calls = [], [], list[tuple[str, str, object]]()
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            reasoning.append(text(block, "thinking", "messages"))
        elif kind == "tool_use":
            its_id, name = text(block, "id", "messages"), text(block, "name", "messages")
            calls.append((its_id, name, block.get("input") or {}))
        elif kind == "text":
            parts.append(_part(block))
        else:
            raise RequestRefusedError(f"messages: a turn of the model has a block of type {kind!r}", "messages")
    builder.add_turn(parts, calls, "".join(reasoning))


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block as a part of content."""
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return {"type": "text", "text": text(block, "text", "messages")}
    if kind == "image" and isinstance(source, dict):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise RequestRefusedError(f"messages: content of type {kind!r} cannot be shown to the model", "messages")


def _system_parts(system: object) -> list[dict[str, Any]]:
    parts = [_part(block) for block in items(system, "system")]
    return [part for part in parts if not str(part.get("text")).startswith(_BILLING)]


def _parse_tools(tools: object) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions, and the types of tools that are left out."""
    functions, left_out = [], []
    for tool in items(tools, "tools"):
        kind = str(tool.get("type") or "custom")
        if isinstance(tool.get("input_schema"), dict):
            name = text(tool, "name", "tools")
            functions.append(function(name, tool.get("description"), tool["input_schema"]))
        elif kind.startswith(_OF_THE_VENDOR):
            left_out.append(kind)
        else:
            raise RequestRefusedError(f"tools: a tool of type {kind!r} has no schema for this model", "tools")
    return functions, left_out


def _head(reply: ModelReply) -> dict[str, Any]:
    usage = {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.completion_tokens,
    }
    its = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": MODEL_NAME}
    return its | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}


def _blocks(reply: ModelReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.id})
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        arguments = json.loads(call.arguments)  # msgspec has no integers of any size
        blocks.append({"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": arguments})
    return blocks


def _empty(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block as it begins."""
    nothing: dict[str, Any] = {"thinking": "", "signature": "", "text": "", "input": {}}
    return {key: nothing.get(key, value) for key, value in block.items()}


def _deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "text":
        yield {"type": "text_delta", "text": block["text"]}
    elif block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    else:
        yield {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
