"""An engine without a model: speaks the engines' protocol, samples from a plain function, and injects faults.

>>> async with ScriptedEngine(lambda token_ids, request: [7, 8, 2]) as engine:  # doctest: +SKIP
...     engine.faults = lambda number, request: "500" if number % 5 == 0 else None
...     client = EngineClient([engine.url], ...)
"""

import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import msgspec
from aiohttp import web

from stream.errors import EngineRefusedError
from workers.engine_api.wire import (
    PROBE_PREFIX,
    UNKNOWN_LOGPROB,
    UNNAMED_WEIGHTS,
    WEIGHT_TRANSFER_BACKEND,
    FinishUpdateRequest,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    TokenLogprob,
    UpdateWeightsRequest,
    VersionSpan,
    build_response,
    decode_generate_request,
    error_body,
)
from workers.runtime.http_server import MAX_BODY_BYTES, Handler, error_middleware, listen

Fault = Literal[
    "500",
    "429",
    "400",
    "hang",
    "reset",
    "garbage",
    "count_mismatch",
    "nan_logprob",
    "unknown_logprob",
    "abort",
    "empty",
    "spans",
]
"""`hang` never answers, `reset` breaks the connection, `spans` leaves the last token without a version (on the route
that reports versions), `unknown_logprob` contains vLLM's placeholder for an unknown log-prob."""

ReplyFunction = Callable[[list[int], GenerateRequest], list[int]]
"""Returns the token ids that are 'sampled' for a prompt; the engine cuts them at the request's `max_tokens`."""

FaultFunction = Callable[[int, GenerateRequest], Fault | None]
"""Returns the fault of a request, by its number counted from 0; None: no fault."""

DelayFunction = Callable[[GenerateRequest], float]
"""Returns the seconds before a request is answered."""

_MAX_RECORDED = 10_000
_TOP_LOGIT = 17.0
"""Largest logit, in nats."""
_CONTROL_ROUTES = ("/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update")


def scripted_logprob(position: int, token: int) -> float:
    """Return the log-prob of `token` at `position` of the whole sequence: arbitrary but deterministic, in [-1, 0)."""
    return -((token * 2_654_435_761 + position * 40_503) % 1000 + 1) / 1000


def _no_faults(_number: int, _request: GenerateRequest) -> Fault | None:
    return None


class ScriptedEngine:
    """An engine that listens while the context is open.

    Args:
        reply: returns the tokens of each answer.
        version: initial version of the weights; None as after a restart.
        max_length: prompt tokens from which a request is refused.
        delay_s: seconds for each answer. Its tokens are spread evenly over that time; tokens before a change of weights
            carry the earlier version.
        port: 0: any free port; a fixed one allows a 'restart' at the same address.
        max_concurrency: requests processed at once; others wait. None: no limit.
    """

    def __init__(
        self,
        reply: ReplyFunction,
        *,
        version: str | None = None,
        max_length: int = 4096,
        delay_s: float | DelayFunction = 0.0,
        port: int = 0,
        max_concurrency: int | None = None,
    ) -> None:
        self.url = ""
        self.version = version
        self._versions: deque[tuple[float, str]] = deque(maxlen=_MAX_RECORDED)
        """Replaced versions, each with the time of its replacement."""
        self.faults: FaultFunction = _no_faults
        self.control_faults: Counter[str] = Counter()
        """Number of next calls that answer 500, by path of the control route."""
        self.transfer_config: dict[str, str] | None = {"backend": WEIGHT_TRANSFER_BACKEND}
        """Weight-transfer configuration in `/server_info`; None: the server was started without one."""
        self.rejected_paths: set[str] = set()
        """Paths of weights that `/update_weights` refuses."""
        self.missing_routes: set[str] = set()
        """Routes that answer 404, as on a server that was started without them."""
        self.is_frozen = False
        """While True, no request is answered, as by a process after SIGSTOP."""
        self.reports_raw_logprobs = False
        """Report log-probs of the raw logits, vLLM's default."""
        self.reports_logits = False
        """Report logits instead, as vLLM does with `--logprobs-mode raw_logits`."""
        self.requests: deque[GenerateRequest] = deque(maxlen=_MAX_RECORDED)
        self.control_calls: deque[str] = deque(maxlen=_MAX_RECORDED)
        """Paths of control calls in order, including calls that failed."""
        self.query_counts: Counter[str] = Counter()
        """Number of calls of each read-only route, by path."""
        self.pushes: list[tuple[str, str]] = []
        """Path and version of each accepted update."""
        self.request_count = 0
        self.too_long_count = 0
        """Requests refused because their prompts are too long; not in `requests`."""
        self.running = 0
        """Unanswered requests, including those that wait."""
        self.aborted_count = 0
        self.is_paused = False
        self._reply = reply
        self._max_length = max_length
        self._delay_s = delay_s
        self._port = port
        self._slots = anyio.CapacityLimiter(max_concurrency or math.inf)
        self._path: str | None = None
        self._resumed = anyio.Event()
        self._closing = anyio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        @web.middleware
        async def closed(request: web.Request, handler: Handler) -> web.StreamResponse:
            while self.is_frozen and not self._closing.is_set():  # noqa: ASYNC110  (tests set the attribute directly)
                await anyio.sleep(0.01)
            return web.Response(status=404) if request.path in self.missing_routes else await handler(request)

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[closed, error_middleware])
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/init_weight_transfer_engine", self._empty_answer)
        app.router.add_post("/reset_prefix_cache", self._empty_answer)
        app.router.add_get("/health", self._empty_answer)
        answers: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("/version", lambda: {"version": "scripted"}),
            ("/v1/models", lambda: {"data": [{"id": "scripted", "max_model_len": self._max_length}]}),
            ("/weight_info", lambda: {"weight_version": self.version}),
            ("/is_paused", lambda: {"is_paused": self.is_paused}),
            ("/server_info", lambda: {"vllm_config": {"weight_transfer_config": self.transfer_config}}),
        ]
        for path, answer in answers:
            app.router.add_get(path, self._query(path, answer))
        app.router.add_get("/metrics", self._metrics)
        for path in _CONTROL_ROUTES:
            app.router.add_post(path, self._control)
        self.url = await self._stack.enter_async_context(listen(app, "127.0.0.1", self._port))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._resumed.set()
        await self._stack.aclose()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, decode_generate_request(await http.read()), self._encode_answer)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        """Answer in the format of `/v1/completions`, which has no versions."""
        body: dict[str, Any] = msgspec.json.decode(await http.read())
        named = {key: value for key, value in body.items() if key in SamplingParams.__struct_fields__}
        request = GenerateRequest(
            token_ids=body["prompt"],
            sampling_params=msgspec.convert(named, SamplingParams, str_keys=True),
            request_id=body.get("request_id", ""),
        )
        return await self._answer(http, request, self._encode_completion)

    async def _answer(
        self,
        http: web.Request,
        request: GenerateRequest,
        encode: Callable[[GenerateRequest, Fault | None, float], bytes],
    ) -> web.StreamResponse:
        if len(request.token_ids) >= self._max_length:
            self.too_long_count += 1
            raise EngineRefusedError(f"the maximum context length is {self._max_length}")
        if request.request_id.startswith(PROBE_PREFIX):
            return web.Response(body=encode(request, None, anyio.current_time()), content_type="application/json")
        number, self.request_count = self.request_count, self.request_count + 1
        self.requests.append(request)
        self.running += 1
        finished = False
        try:
            while self.is_paused and not self._closing.is_set():
                await self._resumed.wait()
            async with self._slots:
                began = anyio.current_time()
                if delay_s := self._delay_s(request) if callable(self._delay_s) else self._delay_s:
                    await anyio.sleep(delay_s)
                fault = self.faults(number, request)
                answer = await self._fail(fault, http) if fault in {"500", "429", "400", "hang", "reset"} else None
                finished = True
                return answer or web.Response(body=encode(request, fault, began), content_type="application/json")
        finally:
            self.running -= 1
            self.aborted_count += not finished

    async def _fail(self, fault: Fault | None, http: web.Request) -> web.Response:
        """Return the response of a failing server, after hanging or breaking the connection if the fault demands it."""
        if fault == "hang":
            await self._closing.wait()
        if fault == "reset" and http.transport is not None:
            http.transport.abort()
        status = int(fault) if fault in {"500", "429", "400"} else 500
        return web.Response(status=status, body=error_body(f"scripted {fault}"))

    def _tokens(self, request: GenerateRequest) -> list[int]:
        """Return the scripted tokens; a probe gets one token without a call of the script."""
        return [0] if request.request_id.startswith(PROBE_PREFIX) else self._reply(list(request.token_ids), request)

    def _encode_answer(self, request: GenerateRequest, fault: Fault | None, began: float) -> bytes:
        """Return the encoded answer of `/inference/v1/generate`, with its fault."""
        limit = min(request.sampling_params.max_tokens, self._max_length - len(request.token_ids))
        sampled = self._tokens(request)
        tokens = [] if fault == "empty" else sampled[:limit]
        logprobs = [scripted_logprob(len(request.token_ids) + i, token) for i, token in enumerate(tokens)]
        reason: Literal["stop", "length", "abort"] = "length" if len(sampled) > limit else "stop"
        end = len(tokens) - (fault == "spans")
        spans = self._spans(end, began)
        top_logprobs = [self._top_logprobs(request.sampling_params)] * len(tokens)
        answer = build_response(request, tokens, logprobs, "abort" if fault == "abort" else reason, spans, top_logprobs)
        content = answer.choices[0].logprobs
        for entry in content.content if self.reports_logits and content is not None else ():
            entry.logprob += _TOP_LOGIT
            entry.top_logprobs = [TokenLogprob(other.logprob + _TOP_LOGIT, other.token_id) for other in top_logprobs[0]]
        if fault == "count_mismatch" and content is not None:
            content.content.pop()
        if fault == "unknown_logprob" and content is not None:
            content.content[0].logprob = UNKNOWN_LOGPROB
        payload = msgspec.json.encode(answer)
        if fault == "garbage":
            return payload[: len(payload) // 2]
        if fault == "nan_logprob" and content is not None:
            old = msgspec.json.encode(content.content[0])
            number = msgspec.json.encode(content.content[0].logprob)
            return payload.replace(old, old.replace(number, b"NaN", 1), 1)  # as Python's json writes it
        return payload

    def _encode_completion(self, request: GenerateRequest, fault: Fault | None, began: float) -> bytes:
        generated = self._encode_answer(request, None if fault in {"garbage", "nan_logprob"} else fault, began)
        choice = msgspec.json.decode(generated, type=GenerateResponse).choices[0]
        content = choice.logprobs.content if choice.logprobs else []
        logprobs = {
            "token_logprobs": [entry.logprob for entry in content],
            "top_logprobs": [{f"token_id:{t.token_id}": t.logprob for t in entry.top_logprobs} for entry in content],
        }
        answer = {"token_ids": choice.token_ids, "finish_reason": choice.finish_reason, "logprobs": logprobs}
        payload = msgspec.json.encode({"choices": [answer]})
        if fault == "nan_logprob":
            return payload.replace(b'"token_logprobs":[', b'"token_logprobs":[NaN', 1)
        return payload[: len(payload) // 2] if fault == "garbage" else payload

    def _top_logprobs(self, params: SamplingParams) -> list[TokenLogprob]:
        """Return log-probs of three tokens with logits one nat apart, at the request's temperature unless raw."""
        temperature = 1.0 if self.reports_raw_logprobs else params.temperature or 1.0
        logits = [-token / temperature for token in range(3)]
        total = math.log(sum(map(math.exp, logits)))
        return [TokenLogprob(logit - total, token) for token, logit in enumerate(logits)][: params.logprobs]

    def _spans(self, end: int, began: float) -> list[VersionSpan]:
        """Return which version sampled which of the first `end` tokens."""
        taken = max(1e-9, anyio.current_time() - began)
        spans: list[VersionSpan] = []
        start = 0
        for until, version in [*self._versions, (began + taken, self.version or UNNAMED_WEIGHTS)]:
            upto = min(end, round(end * (until - began) / taken))
            if upto > start:
                spans.append(VersionSpan(version, start, upto))
                start = upto
        return spans

    async def _control(self, http: web.Request) -> web.Response:
        """Handle a control route; records the order of calls but does not enforce it."""
        body = await http.read()
        self.control_calls.append(http.path)
        if self.control_faults[http.path] > 0:
            self.control_faults[http.path] -= 1
            return web.Response(status=500, body=error_body(f"scripted fault of {http.path}"))
        if http.path == "/pause" and not self.is_paused:
            self.is_paused, self._resumed = True, anyio.Event()
        elif http.path == "/resume":
            self.is_paused = False
            self._resumed.set()
        elif http.path == "/update_weights":
            info = msgspec.json.decode(body, type=UpdateWeightsRequest).update_info
            self._path = info.path or info.url
            if self._path in self.rejected_paths:
                raise EngineRefusedError(f"{self._path}: not this model's weights")
        elif http.path == "/finish_weight_update":
            self._versions.append((anyio.current_time(), self.version or UNNAMED_WEIGHTS))
            self.version = msgspec.json.decode(body, type=FinishUpdateRequest).weight_version
            self.pushes.append((self._path or "", self.version))
        return web.json_response({})

    def _query(
        self, path: str, answer: Callable[[], dict[str, Any]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            self.query_counts[path] += 1
            return web.json_response(answer())

        return handler

    async def _metrics(self, _: web.Request) -> web.Response:
        waiting = self._slots.statistics().tasks_waiting
        return web.Response(
            text=f"vllm:num_requests_running {self.running - waiting}\nvllm:num_requests_waiting {waiting}\n"
        )

    async def _empty_answer(self, _: web.Request) -> web.Response:
        return web.Response()
