"""The local engine's HTTP side: vLLM's routes, kept thin, in front of the generation thread."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, get_args

import anyio
import anyio.to_thread
import msgspec
import structlog
from aiohttp import web
from tokenizers import Tokenizer

from stream.errors import EngineRefusedError
from workers.engine.facts import Facts, as_json
from workers.engine.fetching import downloaded
from workers.engine.generation import Generation, Order
from workers.engine.model import SlotModel
from workers.engine.owner import Doorstep, working
from workers.engine.scheduler import Scheduler
from workers.engine.site import MAX_BODY_BYTES, Handler, answer_errors, listen
from workers.engine.stopping import load_tokenizer
from workers.engine.wire import BACKEND, FinishUpdate, PauseMode, UpdateWeights, WeightInfo, decode_request, response

log = structlog.get_logger()
T = TypeVar("T")


async def serve(
    model_path: Path,
    *,
    host: str = "127.0.0.1",
    port: int,
    max_batch: int,
    max_length: int,
    threads: int,
    dtype: str,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Serve a model until cancelled.

    Args:
        model_path: a folder in Hugging Face form.
        host: address to listen on.
        port: 0 for a free one.
        max_batch: sequences decoded together.
        max_length: tokens of a sequence, prompt included.
        threads: torch threads.
        dtype: `float32` or `bfloat16`.
        ready: called with the URL once it listens.

    Raises:
        SettingsError: the folder holds no such model, or not all of one.
        EngineError: this server cannot run it, the address cannot be listened on, or generation failed.
    """
    load = partial(SlotModel.load, model_path, slots=2 * max_batch, max_length=max_length, dtype=dtype)
    model = await anyio.to_thread.run_sync(load)
    doorstep = Doorstep()
    scheduler = Scheduler(model, max_batch, deliver=doorstep.deliver, failed=doorstep.fail)
    release = await anyio.to_thread.run_sync(version, "penstock")
    tokenizer = await anyio.to_thread.run_sync(load_tokenizer, model_path)
    routes = Routes(scheduler, model, str(model_path), release, tokenizer)
    async with listen(routes.application(), host, port) as url, working(scheduler, threads):
        log.info("engine.listening", url=url, model=str(model_path), max_batch=max_batch, max_length=model.max_length)
        if ready is not None:
            ready(url)
        await doorstep.until_failed(scheduler, "generation")


class Routes:
    """The handlers.

    Args:
        scheduler: does the work.
        model: asked for its limits alone.
        name: the model's name in `/v1/models`.
        release: Penstock's own.
        tokenizer: the model's, for stop strings; None where it has none.
    """

    def __init__(
        self, scheduler: Scheduler, model: SlotModel, name: str, release: str, tokenizer: Tokenizer | None = None
    ) -> None:
        self._scheduler = scheduler
        self._facts = Facts(
            scheduler, "generation", self._counts, name=name, max_length=model.max_length, release=release
        )
        self._max_length = model.max_length
        self._vocabulary = model.vocabulary
        self._end_ids = model.end_ids
        self._tokenizer = tokenizer

    def application(self) -> web.Application:
        """All routes, with errors turned into answers."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer_errors])
        app.router.add_post("/inference/v1/generate", self.generate)
        reads: list[tuple[str, Handler]] = [
            ("/is_paused", self.is_paused),
            ("/weight_info", self.weight_info),
            ("/server_info", self.server_info),
        ]
        orders: list[tuple[str, Handler]] = [
            ("/pause", self.pause),
            ("/resume", self.resume),
            ("/init_weight_transfer_engine", self.init_weight_transfer_engine),
            ("/start_weight_update", self.start_weight_update),
            ("/update_weights", self.update_weights),
            ("/finish_weight_update", self.finish_weight_update),
            ("/reset_prefix_cache", self.reset_prefix_cache),
        ]
        app.router.add_routes(self._facts.routes())
        app.router.add_routes([web.get(path, handler) for path, handler in reads])
        app.router.add_routes([web.post(path, handler) for path, handler in orders])
        return app

    async def generate(self, http: web.Request) -> web.Response:
        """Sample a continuation of token ids."""
        request = decode_request(await http.read())
        if request.stream:
            raise EngineRefusedError("stream: this engine answers in one piece; leave it false")
        done = anyio.Event()
        generation = Generation(
            request,
            vocabulary=self._vocabulary,
            max_length=self._max_length,
            end_ids=self._end_ids,
            tokenizer=self._tokenizer,
            done=done.set,
        )
        if (full := self._facts.crowded()) is not None:
            return full
        self._scheduler.put(generation)
        try:
            await done.wait()
        finally:
            if not done.is_set():
                self._scheduler.abort(generation)
        if generation.error is not None:
            raise generation.error
        reason = generation.reason or "abort"
        g = generation
        return as_json(response(request, g.sampled, g.logprobs, reason, g.spans(), g.likeliest))

    async def is_paused(self, _: web.Request) -> web.Response:
        """Whether generation is frozen."""
        return as_json({"is_paused": self._scheduler.state != "running"})

    async def weight_info(self, _: web.Request) -> web.Response:
        """The version of the weights; null before the first update."""
        return as_json(WeightInfo(self._scheduler.version))

    async def pause(self, http: web.Request) -> web.Response:
        """Freeze generation; requests wait from then on."""
        mode: Any = http.query.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise EngineRefusedError(f"mode={mode}: there are {', '.join(get_args(PauseMode))}")
        keep_kv = http.query.get("clear_cache", "true").lower() in {"false", "0"}
        return await self._order(lambda order: self._scheduler.pause(mode, order, keep_kv=keep_kv))

    async def resume(self, _: web.Request) -> web.Response:
        """Go on."""
        return await self._order(lambda _: self._scheduler.resume())

    async def init_weight_transfer_engine(self, http: web.Request) -> web.Response:
        """Nothing to set up: weights come as files."""
        await http.read()
        return as_json({})

    async def start_weight_update(self, _: web.Request) -> web.Response:
        """Open an update."""
        return await self._order(lambda _: self._scheduler.start_update())

    async def update_weights(self, http: web.Request) -> web.Response:
        """Load a safetensors file, or a model folder, into the live model; from here, or over HTTP."""
        info = _decode(await http.read(), UpdateWeights).update_info
        if (info.path is None) == (info.url is None):
            raise EngineRefusedError("update_info has a path, or a url with files")
        if info.path is not None:
            return await self._load(Path(info.path))
        async with downloaded(info.url or "", info.files) as folder:
            return await self._load(folder)

    async def _load(self, path: Path) -> web.Response:
        return await self._order(lambda _: self._scheduler.update(path))

    async def server_info(self, _: web.Request) -> web.Response:
        """How weights get here, where vLLM tells it."""
        return as_json({"vllm_config": {"weight_transfer_config": {"backend": BACKEND}}})

    async def finish_weight_update(self, http: web.Request) -> web.Response:
        """Give the new weights their version."""
        name = _decode(await http.read(), FinishUpdate).weight_version
        return await self._order(lambda _: self._scheduler.finish_update(name))

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """Forget finished sequences' keys and values."""
        return await self._order(lambda _: self._scheduler.forget_prefixes())

    def _counts(self) -> Iterable[tuple[str, str, float]]:
        s = self._scheduler
        yield "vllm:num_requests_running", "gauge", s.running
        yield "vllm:num_requests_waiting", "gauge", s.waiting
        yield "vllm:kv_cache_usage_perc", "gauge", s.cache_fraction
        yield "vllm:prompt_tokens_total", "counter", s.tokens_prefilled
        yield "vllm:generation_tokens_total", "counter", s.tokens_sampled

    async def _order(self, action: Callable[[Order], bool]) -> web.Response:
        """Have something done on the generation thread, and wait for it."""
        done = anyio.Event()
        order = Order(action, done.set)
        self._scheduler.put(order)
        await done.wait()
        if order.error is not None:
            raise order.error
        return as_json({})


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise EngineRefusedError(f"bad request: {error}") from error
