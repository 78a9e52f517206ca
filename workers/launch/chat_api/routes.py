"""The route `/v1/chat/completions` of an engine, with OpenAI's requests and answers."""

import secrets
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from aiohttp import web

from stream.errors import DataError, EngineError, EngineRefusedError, PenstockError
from workers.launch.chat_api.choice import ChatChoice, ChatPrompt
from workers.launch.chat_api.request import ChatRequest, decode_chat_request
from workers.local_engine.local_server import EngineRoutes
from workers.rollout.chat.chat_setup import ChatSetup, template_kwargs
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.format_detection import choose_tool_format
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import Settings

_MAX_TOOL_SETS = 16
"""Lists of tools whose chat setup is cached; one more empties the cache."""


class ChatRoutes:
    """Handlers of the chat API.

    The first request loads the tokenizer. The engine of a run gets token ids instead of such requests: it loads none.

    Args:
        settings: of these are used the model's folder, its tool-call format, and the arguments of its chat template.
        engine: samples the turns.
    """

    def __init__(self, settings: Settings, engine: EngineRoutes) -> None:
        self._settings, self._engine = settings, engine
        self._chat: ChatTokenizer | None = None
        self._setups: dict[bytes, ChatSetup] = {}
        self._loading = anyio.Lock()

    def routes(self) -> Iterable[web.RouteDef]:
        """Return the routes for an application."""
        return [web.post("/v1/chat/completions", self.complete)]

    async def complete(self, http: web.Request) -> web.StreamResponse:
        """Sample the assistant's messages; answer with one JSON object, or with a stream of server-sent events."""
        request = decode_chat_request(await http.read())
        if request.model not in (None, self._engine.model_name):
            return _not_found(str(request.model), self._engine.model_name)
        if (overload := self._engine.overload_response()) is not None:
            return overload
        prompt = await self._prompt(request)
        requests = request.generate_requests(prompt.ids, prompt.chat.stop_token_ids)
        changed = _Signal()
        with self._engine.sampling(requests, changed.set, each_token=bool(request.stream)) as generations:
            choices = [ChatChoice(index, generation, prompt) for index, generation in enumerate(generations)]
            if request.stream:
                return await self._stream(http, request, choices, changed)
            while not all(generation.is_finished for generation in generations):
                await changed.wait()
        _raise_errors(choices)
        body = self._head("chat.completion") | {"choices": [_choice_body(choice) for choice in choices]}
        return _json(body | {"usage": _usage(choices)})

    async def _prompt(self, request: ChatRequest) -> ChatPrompt:
        """Render the conversation as token ids.

        Raises:
            EngineRefusedError: the model has no chat template, or the template refuses messages or tools.
        """
        tools, messages = request.tools or None, request.conversation()
        try:
            setup = await self._setup(tools)
            ids = await setup.chat.encode_prompt(messages)
        except (DataError, PenstockError) as error:
            raise EngineRefusedError(str(error)) from error
        parses_calls = tools is not None and request.tool_choice != "none"
        return ChatPrompt(
            chat=setup.chat,
            messages=messages,
            ids=ids,
            tool_format=setup.tool_format if parses_calls else None,
            stops=request.stops,
            one_call=request.parallel_tool_calls is False,
            with_logprobs=bool(request.logprobs),
        )

    async def _setup(self, tools: list[dict[str, Any]] | None) -> ChatSetup:
        """Return the chat tokenizer and the tool-call format for a list of tools, cached by the list."""
        key = msgspec.json.encode(tools)
        async with self._loading:
            if key not in self._setups:
                if len(self._setups) >= _MAX_TOOL_SETS:
                    self._setups.clear()
                self._setups[key] = await anyio.to_thread.run_sync(partial(self._load, tools))
            return self._setups[key]

    def _load(self, tools: list[dict[str, Any]] | None) -> ChatSetup:
        settings = self._settings
        if self._chat is None:
            self._chat = ChatTokenizer.load(settings.model.folder, template_kwargs(settings), None)
        if tools is None:
            return ChatSetup(self._chat, TOOL_FORMATS["hermes"])
        chat = self._chat.with_tools(tools)
        return ChatSetup(chat, choose_tool_format(settings.model.tool_format, chat.renderer.template, tools).format)

    async def _stream(
        self, http: web.Request, request: ChatRequest, choices: list[ChatChoice], changed: "_Signal"
    ) -> web.StreamResponse:
        """Send each choice's text as it is sampled, but hold back text that may be the beginning of a tool call."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        head = self._head("chat.completion.chunk")
        for choice in choices:
            start = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await _send(response, head | {"choices": [start | {"logprobs": None}]})
        try:
            while not all(choice.is_ended for choice in choices):
                await changed.wait()
                _raise_errors(choices)
                for choice in choices:
                    for delta in () if choice.is_ended else choice.deltas():
                        await _send(response, head | {"choices": [delta]})
        except EngineError as error:  # the HTTP status was sent already, so the error is an event
            await _send(response, {"error": {"message": str(error), "type": "server_error", "code": None}})
        else:
            if request.stream_options is not None and request.stream_options.include_usage:
                await _send(response, head | {"choices": [], "usage": _usage(choices)})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._engine.model_name,
        }


class _Signal:
    """Wakes one waiting task; a signal that comes while the task does not wait ends its next wait at once."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        """Wake the task."""
        self._event.set()

    async def wait(self) -> None:
        """Wait until there has been a signal since the last call."""
        await self._event.wait()
        self._event = anyio.Event()


def _choice_body(choice: ChatChoice) -> dict[str, Any]:
    message, reason = choice.message()
    return {"index": choice.index, "message": message, "finish_reason": reason, "logprobs": choice.logprobs()}


def _usage(choices: list[ChatChoice]) -> dict[str, int]:
    prompt = choices[0].generation.prompt_length
    sampled = sum(len(choice.generation.sampled) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _raise_errors(choices: list[ChatChoice]) -> None:
    """Raise the first error of a choice, if there is one.

    Raises:
        EngineError: sampling failed, or a pause of the engine aborted it.
    """
    for choice in choices:
        if choice.generation.error is not None:
            raise choice.generation.error
        if choice.generation.finish_reason == "abort":
            raise EngineError("a pause of the engine (mode=abort) ended this request; send it again")


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


def _json(answer: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")


def _not_found(asked: str, served: str) -> web.Response:
    error = {
        "message": f"model: {asked!r} is not served here; the only model is {served!r}",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return _json({"error": error}, 404)
