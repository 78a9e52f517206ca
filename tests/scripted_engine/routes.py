"""HTTP routes of an engine without a model."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
from aiohttp import web

from stream.errors import EngineRefusedError
from tests.scripted_engine.answers import Fault
from tests.scripted_engine.state import ScriptedState
from workers.engine_api.http_server import MAX_BODY_BYTES, Handler, error_middleware
from workers.engine_api.wire import (
    PROBE_PREFIX,
    GenerateRequest,
    SamplingParams,
    decode_generate_request,
    error_body,
)

_CONTROL_ROUTES = ("/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update")
_FAILURES = ("500", "429", "busy", "400", "hang", "reset")
"""Faults that are answered without a sample."""


class ScriptedRoutes:
    """Request handlers; they read and count in the engine's state."""

    def __init__(self, state: ScriptedState) -> None:
        self._state = state

    def application(self) -> web.Application:
        """Return all routes, with errors as responses."""
        state = self._state
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._closed_routes(), error_middleware])
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/init_weight_transfer_engine", self._empty_answer)
        app.router.add_post("/reset_prefix_cache", self._empty_answer)
        app.router.add_get("/health", self._empty_answer)
        answers: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("/version", lambda: {"version": "scripted"}),
            ("/v1/models", lambda: {"data": [{"id": "scripted", "max_model_len": state.max_length}]}),
            ("/weight_info", lambda: {"weight_version": state.version}),
            ("/is_paused", lambda: {"is_paused": state.is_paused}),
            ("/server_info", lambda: {"vllm_config": {"weight_transfer_config": state.transfer_config}}),
        ]
        for path, answer in answers:
            app.router.add_get(path, self._query(path, answer))
        app.router.add_get("/metrics", self._metrics)
        for path in _CONTROL_ROUTES:
            app.router.add_post(path, self._control)
        return app

    def _closed_routes(self) -> Any:
        state = self._state

        @web.middleware
        async def closed(request: web.Request, handler: Handler) -> web.StreamResponse:
            while state.is_frozen and not state.closing.is_set():
                await anyio.sleep(0.01)
            return web.Response(status=404) if request.path in state.missing_routes else await handler(request)

        return closed

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, decode_generate_request(await http.read()), self._state.generate)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = msgspec.json.decode(await http.read())
        named = {key: value for key, value in body.items() if key in SamplingParams.__struct_fields__}
        request = GenerateRequest(
            token_ids=body["prompt"],
            sampling_params=msgspec.convert(named, SamplingParams, str_keys=True),
            request_id=body.get("request_id", ""),
        )
        return await self._answer(http, request, self._state.complete)

    async def _answer(
        self,
        http: web.Request,
        request: GenerateRequest,
        encode: Callable[[GenerateRequest, Fault | None, float], bytes],
    ) -> web.StreamResponse:
        state = self._state
        if len(request.token_ids) >= state.max_length:
            state.too_long_count += 1
            raise EngineRefusedError(f"the maximum context length is {state.max_length}")
        if request.request_id.startswith(PROBE_PREFIX):
            return web.Response(body=encode(request, None, anyio.current_time()), content_type="application/json")
        number, state.request_count = state.request_count, state.request_count + 1
        state.requests.append(request)
        state.running += 1
        finished = False
        try:
            await state.wait_resumed()
            async with state.slots:
                began = anyio.current_time()
                if delay_s := state.delay_s(request):
                    await anyio.sleep(delay_s)
                fault = state.faults(number, request)
                answer = await self._fail(fault, http) if fault in _FAILURES else None
                finished = True
                return answer or web.Response(body=encode(request, fault, began), content_type="application/json")
        finally:
            state.running -= 1
            state.aborted_count += not finished

    async def _fail(self, fault: Fault | None, http: web.Request) -> web.Response:
        """Return the response of a failing server, after hanging or breaking the connection if the fault demands it."""
        if fault == "hang":
            await self._state.closing.wait()
        if fault == "reset" and http.transport is not None:
            http.transport.abort()
        if fault == "busy":
            return web.Response(status=503, headers={"Retry-After": self._state.retry_after}, body=error_body("busy"))
        status = int(fault) if fault in {"500", "429", "400"} else 500
        return web.Response(status=status, body=error_body(f"scripted {fault}"))

    async def _control(self, http: web.Request) -> web.Response:
        state, body = self._state, await http.read()
        state.control_calls.append(http.path)
        if state.control_faults[http.path] > 0:
            state.control_faults[http.path] -= 1
            return web.Response(status=500, body=error_body(f"scripted fault of {http.path}"))
        state.apply(http.path, body)
        return web.json_response({})

    def _query(
        self, path: str, answer: Callable[[], dict[str, Any]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            self._state.query_counts[path] += 1
            return web.json_response(answer())

        return handler

    async def _metrics(self, _: web.Request) -> web.Response:
        waiting = self._state.slots.statistics().tasks_waiting
        return web.Response(
            text=f"vllm:num_requests_running {self._state.running - waiting}\nvllm:num_requests_waiting {waiting}\n"
        )

    async def _empty_answer(self, _: web.Request) -> web.Response:
        return web.Response()
