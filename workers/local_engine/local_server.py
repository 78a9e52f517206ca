"""HTTP routes of the local engine, compatible with vLLM's, and those that every model server has."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import anyio
import anyio.to_thread
import msgspec
import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from tokenizers import Tokenizer

from stream.errors import EngineRefusedError
from workers.engine_api.http_server import MAX_BODY_BYTES, Handler, error_middleware, error_response, listen
from workers.engine_api.wire import (
    WEIGHT_TRANSFER_BACKEND,
    CacheInfo,
    FinishUpdateRequest,
    GenerateRequest,
    PauseMode,
    UpdateWeightsRequest,
    WeightInfo,
    build_response,
    decode_generate_request,
)
from workers.local_engine.model_thread import (
    Generation,
    LoopBridge,
    ModelCommand,
    ModelThread,
    TokenNotice,
    run_model_thread,
)
from workers.local_engine.scheduler import Scheduler
from workers.local_engine.slot_model import SlotModel
from workers.local_engine.token_sampling import load_tokenizer
from workers.local_engine.weights import EngineAccess, check_path, download_weights

MAX_WAITING = 4096
"""Largest number of requests that wait for the model's thread; further requests get status 429."""

_VERSION = version("penstock")
_encoder = msgspec.json.Encoder()

EngineFigure = GaugeMetricFamily | CounterMetricFamily
"""One figure of an engine; names are the same as vLLM's."""


class _EngineCollector(Collector):
    """Reports the figures of an engine at each scrape."""

    def __init__(self, read: Callable[[], Iterable[EngineFigure]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the figures."""
        return self._read()

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering reads nothing."""
        return []


class InfoRoutes:
    """Handlers of read-only routes.

    Args:
        model_thread: thread that runs the model.
        read_metrics: returns the current metrics.
        model_name: name of the model in `/v1/models`.
        max_length: largest number of tokens in a sequence.
    """

    def __init__(
        self,
        model_thread: ModelThread[Any],
        read_metrics: Callable[[], Iterable[EngineFigure]],
        model_name: str,
        max_length: int,
    ) -> None:
        self._model_thread = model_thread
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(read_metrics))
        self._model_name = model_name
        self._max_length = max_length

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for an application."""
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
        ]

    def overload_response(self) -> web.Response | None:
        """Return a response with status 429 if `MAX_WAITING` requests wait, else None."""
        if self._model_thread.waiting < MAX_WAITING:
            return None
        return error_response(429, f"{MAX_WAITING} requests are waiting")

    async def health(self, _: web.Request) -> web.Response:
        """Answer 200 while the thread works; 503 with the error after it failed."""
        failure = self._model_thread.failure
        if failure is None:
            return web.Response()
        return error_response(503, f"{self._model_thread.activity} has failed: {failure!r}")

    async def metrics(self, _: web.Request) -> web.Response:
        """Return the metrics in Prometheus' text format."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, _: web.Request) -> web.Response:
        """List the served model."""
        model = {
            "id": self._model_name,
            "object": "model",
            "owned_by": "penstock",
            "max_model_len": self._max_length,
        }
        return json_response({"object": "list", "data": [model]})

    async def version(self, _: web.Request) -> web.Response:
        """Return the name and version of the server."""
        return json_response({"version": f"penstock-{_VERSION}"})


def json_response(answer: object) -> web.Response:
    """Return a response with status 200."""
    return web.Response(body=_encoder.encode(answer), content_type="application/json")


log = structlog.get_logger()
T = TypeVar("T")


class EngineLimits(NamedTuple):
    """How many sequences an engine has room for, and how long they are."""

    max_batch: int
    """Largest number of sequences decoded together."""
    max_length: int
    """Largest number of tokens in a sequence, prompt included."""
    max_cache_bytes: int = 1 << 62
    """Memory for keys and values."""


async def serve_local_engine(
    model_path: Path,
    *,
    access: EngineAccess = EngineAccess(host="127.0.0.1"),  # noqa: B008  (it is frozen)
    port: int,
    limits: EngineLimits,
    threads: int,
    dtype: str,
    ready: Callable[[str], object] | None = None,
    more_routes: Callable[["EngineRoutes"], Iterable[web.RouteDef]] = lambda _: (),
) -> None:
    """Serve a model until cancelled.

    Args:
        model_path: model folder in Hugging Face format.
        access: address to listen on, and which requests and weights are accepted; the model's own folder always is.
        port: port to listen on; 0: any free port.
        limits: of its sequences.
        threads: number of torch threads.
        dtype: `float32` or `bfloat16`.
        ready: called with the URL once the server listens.
        more_routes: returns routes that sample with the engine.

    Raises:
        SettingsError: the folder holds no causal model, or an incomplete one.
        EngineError: the local engine does not support the model, the address is not available, or generation failed.
    """
    max_batch = limits.max_batch
    sizes = {"slots": 2 * max_batch, "max_length": limits.max_length, "max_cache_bytes": limits.max_cache_bytes}
    load = partial(SlotModel.load, model_path, dtype=dtype, **sizes)
    model = await anyio.to_thread.run_sync(load)
    bridge = LoopBridge()
    scheduler = Scheduler(model, max_batch, deliver=bridge.deliver, on_failure=bridge.fail)
    tokenizer = await anyio.to_thread.run_sync(load_tokenizer, model_path)
    routes = EngineRoutes(scheduler, model, str(model_path), tokenizer, (*access.weight_folders, model_path))
    app = routes.application(more_routes(routes))
    serve = listen(app, access.host, port, rules=access, max_connections=MAX_WAITING)
    async with serve as url, run_model_thread(scheduler, threads):
        log.info("engine.listening", url=url, model=str(model_path), max_batch=max_batch, max_length=model.max_length)
        if ready is not None:
            ready(url)
        await bridge.wait_failed(scheduler)


class EngineRoutes:
    """Request handlers.

    Args:
        scheduler: runs the requests.
        model: only its limits are read.
        model_name: name of the model in `/v1/models`.
        tokenizer: tokenizer of the model, for stop strings; None if it has none.
        weight_folders: folders whose files may become weights without a digest.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: SlotModel,
        model_name: str,
        tokenizer: Tokenizer | None = None,
        weight_folders: tuple[Path, ...] = (),
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._info = InfoRoutes(scheduler, self._metrics, model_name, model.max_length)
        self.model_name = model_name
        self.max_length = model.max_length
        self._vocab_size = model.vocab_size
        self._eos_token_ids = model.eos_token_ids
        self._tokenizer = tokenizer
        self._weight_folders = weight_folders

    def application(self, more_routes: Iterable[web.RouteDef] = ()) -> web.Application:
        """Return all routes, with errors as responses."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[error_middleware])
        app.router.add_post("/inference/v1/generate", self.generate)
        reads: list[tuple[str, Handler]] = [
            ("/is_paused", self.is_paused),
            ("/weight_info", self.weight_info),
            ("/server_info", self.server_info),
        ]
        commands: list[tuple[str, Handler]] = [
            ("/pause", self.pause),
            ("/resume", self.resume),
            ("/init_weight_transfer_engine", self.init_weight_transfer_engine),
            ("/start_weight_update", self.start_weight_update),
            ("/update_weights", self.update_weights),
            ("/finish_weight_update", self.finish_weight_update),
            ("/reset_prefix_cache", self.reset_prefix_cache),
        ]
        app.router.add_routes(self._info.routes())
        app.router.add_routes([web.get(path, handler) for path, handler in reads])
        app.router.add_routes([web.post(path, handler) for path, handler in commands])
        app.router.add_routes(more_routes)
        return app

    async def generate(self, http: web.Request) -> web.Response:
        """Sample a continuation of token ids."""
        request = decode_generate_request(await http.read())
        if request.stream:
            raise EngineRefusedError("stream: this engine does not stream; leave it false")
        if (full := self.overload_response()) is not None:
            return full
        done = anyio.Event()
        with self.sampling([request], done.set) as (generation,):
            await done.wait()
        if generation.error is not None:
            raise generation.error
        reason = generation.finish_reason or "abort"
        g = generation
        return json_response(build_response(request, g.sampled, g.logprobs, reason, g.version_spans(), g.top_logprobs))

    def overload_response(self) -> web.Response | None:
        """Return a response with status 429 if too many requests wait, else None."""
        return self._info.overload_response()

    @contextmanager
    def sampling(
        self, requests: Sequence[GenerateRequest], wake: Callable[[], None], *, each_token: bool = False
    ) -> Iterator[list[Generation]]:
        """Sample continuations while the context is open; leaving it aborts the unfinished ones.

        Args:
            requests: all are checked before the first one is sampled.
            wake: called on the event loop whenever one of them has finished.
            each_token: call it after each token, too.

        Yields:
            The generations; their tokens grow.

        Raises:
            EngineRefusedError: as `Generation`.
        """
        generations = [
            Generation(
                request,
                vocab_size=self._vocab_size,
                max_length=self.max_length,
                eos_token_ids=self._eos_token_ids,
                tokenizer=self._tokenizer,
                wake=wake,
                on_token=TokenNotice(wake) if each_token else None,
            )
            for request in requests
        ]
        for generation in generations:
            self._scheduler.submit(generation)
        try:
            yield generations
        finally:
            for generation in generations:
                if not generation.is_finished:
                    self._scheduler.abort(generation)

    async def is_paused(self, _: web.Request) -> web.Response:
        """Return whether decoding is paused or about to pause."""
        return json_response({"is_paused": self._scheduler.state != "running"})

    async def weight_info(self, _: web.Request) -> web.Response:
        """Return the weights' name, null before the first update, what the cache takes, and what updates may be."""
        cache = CacheInfo(self._model.cache_bytes, self._model.max_cache_bytes)
        return json_response(WeightInfo(self._scheduler.version, cache, merges_adapters=True))

    async def pause(self, http: web.Request) -> web.Response:
        """Pause decoding; new requests wait."""
        mode: Any = http.query.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise EngineRefusedError(f"mode={mode}: allowed are {', '.join(get_args(PauseMode))}")
        keep_kv = http.query.get("clear_cache", "true").lower() in {"false", "0"}
        return await self._run_command(lambda command: self._scheduler.pause(mode, command, keep_kv_cache=keep_kv))

    async def resume(self, _: web.Request) -> web.Response:
        """Resume decoding."""
        return await self._run_command(lambda _: self._scheduler.resume())

    async def init_weight_transfer_engine(self, http: web.Request) -> web.Response:
        """Accept the call without effect: weights arrive as files."""
        await http.read()
        return json_response({})

    async def start_weight_update(self, _: web.Request) -> web.Response:
        """Begin a weight update."""
        return await self._run_command(lambda _: self._scheduler.start_weight_update())

    async def update_weights(self, http: web.Request) -> web.Response:
        """Load a model or an adapter from a folder, or a safetensors file: of the run's folder, or with digests."""
        info = _decode(await http.read(), UpdateWeightsRequest).update_info
        if (info.path is None) == (info.url is None):
            raise EngineRefusedError("update_info has a path, or a url with files")
        if info.path is not None:
            path = Path(info.path)
            await anyio.to_thread.run_sync(check_path, path, self._weight_folders, info.files)
            return await self._load(path)
        async with download_weights(info.url or "", info.files) as folder:
            return await self._load(folder)

    async def _load(self, path: Path) -> web.Response:
        return await self._run_command(lambda _: self._scheduler.update_weights(path))

    async def server_info(self, _: web.Request) -> web.Response:
        """Return the weight-transfer backend in the same field as vLLM."""
        return json_response({"vllm_config": {"weight_transfer_config": {"backend": WEIGHT_TRANSFER_BACKEND}}})

    async def finish_weight_update(self, http: web.Request) -> web.Response:
        """Name the new weights."""
        name = _decode(await http.read(), FinishUpdateRequest).weight_version
        return await self._run_command(lambda _: self._scheduler.finish_weight_update(name))

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """Forget the keys and values of finished sequences."""
        return await self._run_command(lambda _: self._scheduler.reset_prefix_cache())

    def _metrics(self) -> Iterable[EngineFigure]:
        s = self._scheduler
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests that are being sampled.", s.running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait.", s.waiting)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", s.kv_cache_usage)
        yield GaugeMetricFamily("penstock_cache_bytes", "Memory of keys and values.", self._model.cache_bytes)
        yield GaugeMetricFamily("penstock_cache_limit_bytes", "The most it may be.", self._model.max_cache_bytes)
        yield CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens read.", s.tokens_prefilled)
        yield CounterMetricFamily("vllm:generation_tokens", "Tokens sampled.", s.tokens_sampled)

    async def _run_command(self, action: Callable[[ModelCommand], bool]) -> web.Response:
        """Run a command on the generation thread, and wait for it."""
        done = anyio.Event()
        command = ModelCommand(action, done.set)
        self._scheduler.submit(command)
        await done.wait()
        if command.error is not None:
            raise command.error
        return json_response({})


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError as error:
        raise EngineRefusedError(f"bad request: {error}") from error
