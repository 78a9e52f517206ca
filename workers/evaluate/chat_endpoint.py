"""A model behind OpenAI's chat completions API, of any server.

A server that does not parse tool calls (vLLM without `--enable-auto-tool-choice`, transformers) shows the tools to the
model and returns its calls as text, which is then parsed here.
"""

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from envs.remote.service_client import ClientOptions, RewardServiceClient, error_message
from stream.errors import EngineError, EngineRefusedError, ServiceError, ServiceRefusedError, SettingsError
from stream.records import Message
from workers.rollout.messages import storable_arguments
from workers.rollout.tool_formats.parsing import ParsedTurn, ToolCall, ToolFormat, parse_error

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the endpoint's key, as OpenAI's client reads it."""
_MODELS_TIMEOUT_S = 20.0
_MAX_ATTEMPTS = 3
_NO_TOOL_PARSER = ("tool-call-parser", "tool choice requires", "enable-auto-tool-choice")
"""Phrases with which a server refuses tools because it cannot parse calls."""


class ChatTurn(msgspec.Struct, frozen=True):
    """One turn of the model."""

    text: str
    parsed: ParsedTurn
    """The turn with its tool calls."""
    reasoning: str
    is_truncated: bool
    """The turn reached its limit of tokens."""


class ChatEndpoint:
    """Samples turns. Made by `open_chat_endpoint`.

    Args:
        client: sends the requests.
        model: name of the model in the requests.
        tool_format: how calls are written where the server leaves them in the text.
    """

    def __init__(self, client: RewardServiceClient, model: str, tool_format: ToolFormat) -> None:
        self.model = model
        self._client = client
        self._tool_format = tool_format
        self._tool_choice = "auto"

    async def complete(
        self, messages: Sequence[Message], tools: list[dict[str, Any]], options: Mapping[str, Any]
    ) -> ChatTurn:
        """Sample one turn.

        Args:
            messages: the conversation so far.
            tools: schemas of the environment's tools.
            options: further fields of the request, such as `temperature` and `max_tokens`.

        Raises:
            EngineRefusedError: the server refused the request.
            EngineError: it does not answer, or with something other than a chat completion.
        """
        request = {"model": self.model, "messages": [_to_openai(message) for message in messages], **options}
        if tools:
            request |= {"tools": [_without_return(tool) for tool in tools], "tool_choice": self._tool_choice}
        try:
            answer = await self._post(request)
        except EngineRefusedError as error:
            if request.get("tool_choice") != "auto" or not any(phrase in str(error) for phrase in _NO_TOOL_PARSER):
                raise
            self._tool_choice = "none"  # the model still sees the tools; concurrent requests were sent with "auto", too
            answer = await self._post(request | {"tool_choice": "none"})
        try:
            return self._parse(answer["choices"][0])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise EngineError(f"the endpoint returned something other than a chat completion: {error!r}") from error

    async def _post(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            payload, _ = await self._client.post("/chat/completions", msgspec.json.encode(request))
        except ServiceRefusedError as error:
            raise EngineRefusedError(str(error)) from error
        except ServiceError as error:
            raise EngineError(str(error)) from error
        try:
            return msgspec.json.decode(payload, type=dict[str, Any])
        except ValueError as error:
            raise EngineError(f"the endpoint returned no JSON object: {payload[:200]!r}") from error

    def _parse(self, choice: Mapping[str, Any]) -> ChatTurn:
        message = choice["message"]
        content = str(message.get("content") or "")
        found = message.get("tool_calls")
        parsed = _parse_calls(content, found) if found else self._tool_format.parse(content)
        reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
        return ChatTurn(content, parsed, reasoning, choice.get("finish_reason") == "length")


@asynccontextmanager
async def open_chat_endpoint(
    url: str, model: str, tool_format: ToolFormat, timeout_s: float
) -> AsyncIterator[ChatEndpoint]:
    """Connect to an endpoint.

    Args:
        url: base URL, with or without `/v1`.
        model: name of the model; empty: the first that the server lists.
        tool_format: see `ChatEndpoint`.
        timeout_s: deadline of one request.

    Raises:
        SettingsError: the server lists no models, and none is named.
        EngineError: it does not answer.
    """
    base = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    key = os.environ.get(KEY_VARIABLE, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    options = ClientOptions(timeout_s=timeout_s, max_attempts=_MAX_ATTEMPTS)
    async with RewardServiceClient([base], options, headers=headers, secret=key) as client:
        yield ChatEndpoint(client, model or await _first_model(base, headers), tool_format)


async def _first_model(base: str, headers: Mapping[str, str]) -> str:
    timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(f"{base}/models") as response,
        ):
            payload = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EngineError(f"no server answers at {base}: {error or type(error).__name__}") from error
    try:
        return str(json.loads(payload)["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        said = error_message(payload)[:200]
        raise SettingsError(f"{base}/models lists no model ({said}); name one with --model") from error


def _parse_calls(content: str, calls: Sequence[Mapping[str, Any]]) -> ParsedTurn:
    parsed = ParsedTurn(content)
    for call in calls:
        function = call["function"]
        raw = function.get("arguments") or "{}"
        try:
            arguments = json.loads(raw) if isinstance(raw, str) else raw
        except (ValueError, RecursionError) as error:
            parsed.errors.append(parse_error(f"its arguments are not JSON: {error}"))
            continue
        if not isinstance(arguments, dict):
            parsed.errors.append(parse_error("its arguments are not an object"))
            continue
        text = raw if isinstance(raw, str) else json.dumps(raw)
        parsed.calls.append(ToolCall(str(function["name"]), storable_arguments(arguments, text), text))
    return parsed


def _to_openai(message: Message) -> Message:
    """Return a message with the arguments of its calls as text."""
    if not (calls := message.get("tool_calls")):
        return message
    return message | {
        "tool_calls": [
            call | {"function": call["function"] | {"arguments": _as_text(call["function"]["arguments"])}}
            for call in calls
        ]
    }


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _without_return(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema without the description of its result, which OpenAI's API does not know."""
    function = {name: value for name, value in tool["function"].items() if name != "return"}
    return {**tool, "function": function}
