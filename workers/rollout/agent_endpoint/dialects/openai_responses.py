"""OpenAI's Responses, without the state that its service keeps: the program sends the whole conversation.

A turn of the model is several items there: reasoning, message, calls. On the way back the same items, in this order,
are one turn again.
"""

import time
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
)
from workers.rollout.agent_endpoint.dialects.openai_chat import openai_error
from workers.rollout.agent_endpoint.fields import check_fields
from workers.rollout.agent_endpoint.messages import MessageBuilder
from workers.rollout.agent_endpoint.neutral import ModelReply, ModelRequest, RequestRefusedError
from workers.rollout.agent_endpoint.request_source import source_of

_BETWEEN = "__"
"""Between a namespace and the name of a tool, as the model sees them."""
_OF_THE_VENDOR = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
"""Beginnings of the types of tools that the vendor runs itself."""


class OpenAIResponses:
    """`POST /v1/responses`."""

    name: ClassVar[str] = "responses"
    ping: ClassVar[bytes] = b": ping\n\n"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        """Read a request."""
        unused = check_fields(body, self.name)
        conversation = _Conversation()
        if (instructions := body.get("instructions")) is not None:
            conversation.builder.add("system", instructions)
        given = body.get("input")
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else items(given, "input"):
            conversation.add(item)
        conversation.end_turn()
        if not conversation.builder.messages:
            raise RequestRefusedError("input: a text, or a list with at least one message expected", "input")
        refuse_prefill(conversation.builder.messages, "input")
        tools, namespaces, left_out = _parse_tools(body.get("tools"))
        return ModelRequest(
            messages=conversation.builder.messages,
            tools=None if body.get("tool_choice") == "none" else tools or None,
            max_tokens=count(body, "max_output_tokens"),
            one_call=body.get("parallel_tool_calls") is False,
            streams=bool(body.get("stream")),
            namespaces=namespaces,
            source=source_of(headers),
            is_retry=is_retry(headers),
            idempotency_key=headers.get(IDEMPOTENCY_KEY, ""),
            unused=(*unused, *left_out),
        )

    def body(self, reply: ModelReply, request: ModelRequest) -> dict[str, Any]:
        """Return a response."""
        ending: dict[str, Any] = {"status": "completed", "incomplete_details": None}
        if reply.finish == "length":
            ending = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return _response(reply.id) | ending | {"output": _output(reply, request), "usage": _usage(reply)}

    def events(self, reply: ModelReply, request: ModelRequest) -> Iterator[bytes]:
        """Yield the response as it is made: its beginning, each item, and the whole."""
        for number, (name, data) in enumerate(self._events(reply, request)):
            yield event({"type": name, "sequence_number": number} | data, name)

    def _events(self, reply: ModelReply, request: ModelRequest) -> Iterator[tuple[str, dict[str, Any]]]:
        begun = _begun(reply.id)
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(_output(reply, request)):
            place = {"item_id": item["id"], "output_index": index}
            yield "response.output_item.added", {"output_index": index, "item": _unfinished(item)}
            yield from _item_events(item, place)
            yield "response.output_item.done", {"output_index": index, "item": item}
        ended = self.body(reply, request)
        yield f"response.{ended['status']}", {"response": ended}

    def error(self, status: int, error: Exception) -> dict[str, Any]:
        """Return OpenAI's error."""
        return {"error": openai_error(status, error)}

    def error_event(self, status: int, error: Exception) -> bytes:
        """Return a failed response; clients want its beginning first."""
        found = openai_error(status, error)
        begun = _begun("failed")
        code = found["code"] or "server_error"
        failed = begun | {"status": "failed", "error": {"code": code, "message": found["message"]}}
        steps = (("response.created", begun), ("response.failed", failed))
        return b"".join(
            event({"type": name, "sequence_number": number, "response": response}, name)
            for number, (name, response) in enumerate(steps)
        )


class _Conversation:
    """Puts the items of the model's turns together.

    Attributes:
        builder: of the messages.
    """

    def __init__(self) -> None:
        self.builder = MessageBuilder()
        self._clear()

    def _clear(self) -> None:
        self._reasoning: list[str] = []
        self._content: object = None
        self._calls: list[tuple[str, str, object]] = []

    def end_turn(self) -> None:
        """Append the model's turn, if there is one."""
        if self._reasoning or self._content is not None or self._calls:
            self.builder.add_turn(self._content, self._calls, "".join(self._reasoning))
        self._clear()

    def add(self, item: Mapping[str, Any]) -> None:
        """Append one item of a request's input."""
        kind = item.get("type", "message")
        if kind == "reasoning":
            if self._content is not None or self._calls:
                self.end_turn()
            parts = items(item.get("content"), "input") or items(item.get("summary"), "input")
            self._reasoning += [text(part, "text", "input") for part in parts]
        elif kind == "message" and item.get("role") == "assistant":
            if self._content is not None or self._calls:
                self.end_turn()
            self._content = _parts(item.get("content"))
        elif kind == "function_call":
            name = text(item, "name", "input")
            if namespace := item.get("namespace"):
                name = f"{namespace}{_BETWEEN}{name}"
            self._calls.append((text(item, "call_id", "input"), name, item.get("arguments") or "{}"))
        elif kind == "message":
            self.end_turn()
            self.builder.add(text(item, "role", "input"), _parts(item.get("content")))
        elif kind == "function_call_output":
            self.end_turn()
            self.builder.add_result(text(item, "call_id", "input"), _parts(item.get("output")))
        else:
            raise RequestRefusedError(f"input: an item of type {kind!r} cannot be shown to the model", "input")


def _parts(content: object) -> Any:
    """Return content as chat templates take it."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for part in items(content, "input"):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": text(part, "text", "input")})
        elif kind == "refusal":
            parts.append({"type": "text", "text": text(part, "refusal", "input")})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise RequestRefusedError(f"input: content of type {kind!r} cannot be shown to the model", "input")
    return parts


def _parse_tools(tools: object) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]], list[str]]:
    """Return the functions, the parts of each name that has a namespace, and the types of tools that are left out."""
    functions, namespaces, left_out = [], {}, []
    for tool in items(tools, "tools"):
        kind = str(tool.get("type"))
        if kind == "namespace":
            namespace = text(tool, "name", "tools")
            for each in items(tool.get("tools"), "tools"):
                name = text(each, "name", "tools")
                namespaces[f"{namespace}{_BETWEEN}{name}"] = namespace, name
                functions.append(_function(each, f"{namespace}{_BETWEEN}{name}"))
        elif kind == "function":
            functions.append(_function(tool, text(tool, "name", "tools")))
        elif kind.startswith(_OF_THE_VENDOR):
            left_out.append(kind)
        else:
            raise RequestRefusedError(f"tools: a tool of type {kind!r} has no form for this model", "tools")
    return functions, namespaces, left_out


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    return function(name, tool.get("description"), tool.get("parameters"))


def _response(its_id: str) -> dict[str, Any]:
    """Return what every form of a response has; what the request asked for is not repeated."""
    return {
        "id": f"resp_{its_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL_NAME,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _begun(its_id: str) -> dict[str, Any]:
    """Return a response that has nothing yet."""
    nothing: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    return _response(its_id) | nothing


def _output(reply: ModelReply, request: ModelRequest) -> list[dict[str, Any]]:
    """Return the items of a turn: its reasoning, its text, its calls."""
    output: list[dict[str, Any]] = []
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content})
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        status = "incomplete" if reply.finish == "length" else "completed"
        message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": status, "content": [part]}
        output.append(message)
    for call in reply.calls:
        namespace, name = request.namespaces.get(call.name, ("", call.name))
        item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": f"call_{call.id}"}
        item |= {"name": name, "arguments": call.arguments, "status": "completed"}
        output.append(item | ({"namespace": namespace} if namespace else {}))
    return output


def _unfinished(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as it begins."""
    nothing = {"content": [], "summary": [], "arguments": "", "status": "in_progress"}
    return {key: nothing.get(key, value) for key, value in item.items()}


def _item_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what comes between the beginning and the end of an item."""
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
        done = {**place, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
        return
    (part,) = item["content"]
    place = {**place, "content_index": 0}
    if item["type"] == "reasoning":
        yield "response.reasoning_text.delta", {**place, "delta": part["text"]}
        yield "response.reasoning_text.done", {**place, "text": part["text"]}
        return
    yield "response.content_part.added", {**place, "part": part | {"text": ""}}
    yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**place, "part": part}


def _usage(reply: ModelReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
