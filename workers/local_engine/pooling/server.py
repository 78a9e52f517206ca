"""Serves a reward model as vLLM does with `--runner pooling`: `POST /classify` and the info routes."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import structlog
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from torch import Tensor

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.http_access import AccessRules
from workers.engine_api.http_server import MAX_BODY_BYTES, error_middleware, error_response, listen
from workers.local_engine.info_routes import MAX_WAITING, EngineFigure, InfoRoutes, json_response
from workers.local_engine.model_thread import LoopBridge, run_model_thread
from workers.local_engine.pooling.classifier import Classifier
from workers.local_engine.pooling.thread import PoolingRequest, PoolingThread
from workers.local_engine.pooling.wire import (
    Classification,
    ClassifyRequest,
    ClassifyResponse,
    Usage,
    decode_classify_request,
)

log = structlog.get_logger()


async def serve_pooling(
    model_path: Path,
    *,
    access: AccessRules = AccessRules(host="127.0.0.1"),  # noqa: B008  (it is frozen)
    port: int,
    max_length: int,
    threads: int,
    dtype: str,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Serve a sequence classifier until cancelled, then answer running requests for up to two seconds.

    Args:
        model_path: model folder in Hugging Face format.
        access: address to listen on, and which requests are answered.
        port: port to listen on; 0: any free port.
        max_length: largest number of tokens in a conversation; 0: the model's positions.
        threads: number of torch threads.
        dtype: `float32` or `bfloat16`.
        ready: called with the URL once the server listens.

    Raises:
        SettingsError: the folder holds no classifier, or an incomplete one.
        EngineError: the classifier is not supported, the address is not available, or scoring failed.
    """
    load = partial(Classifier.load, model_path, max_length=max_length, dtype=dtype)
    model = await anyio.to_thread.run_sync(load)
    bridge = LoopBridge()
    thread = PoolingThread(model, deliver=bridge.deliver, on_failure=bridge.fail)
    routes = PoolingRoutes(thread, model, str(model_path))
    serve = listen(routes.application(), access.host, port, rules=access, max_connections=MAX_WAITING)
    async with run_model_thread(thread, threads), serve as url:
        log.info("engine.listening", url=url, model=str(model_path), runner="pooling", classes=model.num_classes)
        if ready is not None:
            ready(url)
        await bridge.wait_failed(thread)


class PoolingRoutes:
    """Request handlers.

    Args:
        thread: scores the sequences.
        model: renders conversations and names the classes.
        model_name: name of the model in `/v1/models`.
    """

    def __init__(self, thread: PoolingThread, model: Classifier, model_name: str) -> None:
        self._thread = thread
        self._model = model
        self._model_name = model_name
        self._info = InfoRoutes(thread, self._metrics, model_name, model.max_length)
        self._rendering = anyio.CapacityLimiter(1)  # a tokenizer is not thread-safe

    def application(self) -> web.Application:
        """Return all routes, with errors as responses."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[error_middleware])
        app.router.add_post("/classify", self.classify)
        app.router.add_routes(self._info.routes())
        return app

    async def classify(self, http: web.Request) -> web.Response:
        """Score a conversation, or several texts."""
        request = decode_classify_request(await http.read())
        if request.model is not None and request.model != self._model_name:
            return error_response(404, f"The model `{request.model}` does not exist.")
        if (full := self._info.overload_response()) is not None:
            return full
        sequences = await anyio.to_thread.run_sync(self._tokens, request, limiter=self._rendering)
        if not sequences:
            raise EngineRefusedError("input is empty: there is nothing to classify")
        logits_NC = await self._score(sequences)
        probs = logits_NC if request.use_activation is False else self._model.apply_activation(logits_NC)
        read = sum(map(len, sequences))
        answer = ClassifyResponse(
            model=self._model_name,
            data=[self._classification(i, row) for i, row in enumerate(probs)],
            usage=Usage(read, read),
        )
        return json_response(answer)

    def _metrics(self) -> Iterable[EngineFigure]:
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests in a forward pass.", self._thread.running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait.", self._thread.waiting)
        yield CounterMetricFamily("vllm:prompt_tokens", "Tokens read.", self._thread.tokens_read)

    def _tokens(self, request: ClassifyRequest) -> list[list[int]]:
        """Return the sequences of a request as tokens; called in a thread."""
        if request.messages is not None:
            options = request.chat_template_kwargs | {
                "add_generation_prompt": request.add_generation_prompt,
                "continue_final_message": request.continue_final_message,
            }
            return [self._model.render(request.messages, **options)]
        special = request.add_special_tokens is not False
        return [
            self._model.encode(entry, add_special_tokens=special)
            if isinstance(entry, str)
            else self._model.check_tokens(entry)
            for entry in request.inputs()
        ]

    async def _score(self, sequences: list[list[int]]) -> Tensor:
        done = anyio.Event()
        pooling = PoolingRequest(sequences, done.set)
        self._thread.submit(pooling)
        try:
            await done.wait()
        finally:
            pooling.is_cancelled = not done.is_set()
        if pooling.error is not None or pooling.logits is None:
            raise pooling.error or EngineError("the request came back without scores")
        return pooling.logits

    def _classification(self, index: int, probs_C: Tensor) -> Classification:
        best = int(probs_C.argmax())
        return Classification(index, self._model.labels.get(best), probs_C.tolist(), len(probs_C))
