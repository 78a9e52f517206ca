"""Serves a reward model as vLLM does with `--runner pooling`: `POST /classify` and the info routes.

The thread that owns the classifier scores all waiting requests together, in rounds.
"""

import time
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import msgspec
import structlog
from aiohttp import web
from msgspec import Struct, field
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from torch import Tensor

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.http_access import AccessRules
from workers.engine_api.http_server import MAX_BODY_BYTES, error_middleware, error_response, listen
from workers.local_engine.local_server import MAX_WAITING, EngineFigure, InfoRoutes, json_response
from workers.local_engine.model_thread import LoopBridge, ModelThread, run_model_thread
from workers.local_engine.pooling.classifier import Classifier

MAX_SEQUENCES_PER_ROUND = 512
"""A round with this many sequences takes no further request, so that a burst delays other requests only briefly."""


class PoolingRequest:
    """The sequences of one request."""

    __slots__ = ("error", "is_cancelled", "logits", "sequences", "wake")

    def __init__(self, sequences: list[list[int]], wake: Callable[[], None]) -> None:
        self.sequences = sequences
        self.wake = wake
        self.logits: Tensor | None = None
        """Result [sequences, classes]; None until scored."""
        self.error: EngineError | None = None
        self.is_cancelled = False
        """Whether the client has disconnected."""


class PoolingThread(ModelThread[PoolingRequest]):
    """Scores the sequences of waiting requests.

    Args:
        model: the classifier; no other thread may score with it.
        deliver: see `ModelThread`.
        on_failure: see `ModelThread`.
    """

    activity: ClassVar[str] = "scoring"

    def __init__(
        self,
        model: Classifier,
        deliver: Callable[[list[PoolingRequest]], object],
        on_failure: Callable[[], object],
    ) -> None:
        super().__init__(deliver, on_failure)
        self.tokens_read = 0
        self.running = 0
        """Number of sequences in the current round."""
        self._model = model
        self._round: list[PoolingRequest] = []

    @property
    def waiting(self) -> int:
        """Number of requests that have not been started."""
        return self._mailbox.qsize()

    def step(self) -> None:
        """Wait for a request, then score it together with all others that wait, up to the limit of a round."""
        self._round = self._next_round()
        sequences = [ids for request in self._round for ids in request.sequences]
        if not sequences:
            return
        self.running = len(sequences)
        logits_NC = self._model.score(sequences)
        self.running = 0
        self.tokens_read += sum(map(len, sequences))
        start = 0
        for request in self._round:
            end = start + len(request.sequences)
            request.logits, start = logits_NC[start:end], end
        self._deliver(self._take_unfinished())

    def _next_round(self) -> list[PoolingRequest]:
        first = self._mailbox.get()
        requests = [] if first is None else [first]
        count = sum(len(request.sequences) for request in requests)
        while count < MAX_SEQUENCES_PER_ROUND:
            try:
                request = self._mailbox.get_nowait()
            except Empty:
                break
            if request is not None:
                requests.append(request)
                count += len(request.sequences)
        return [request for request in requests if not request.is_cancelled]

    def _take_unfinished(self) -> list[PoolingRequest]:
        unfinished, self._round = self._round, []
        return unfinished


class ClassifyRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /classify`: a conversation in `messages`, or texts or token ids in `input`."""

    messages: list[dict[str, Any]] | None = None
    input: str | list[str | int | list[int]] | None = None
    use_activation: bool | None = None
    """None means True, as in vLLM."""
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    user: str | None = None
    request_id: str = ""

    def inputs(self) -> list[str | list[int]]:
        """Return `input` as one text, or one list of token ids, per sequence.

        Raises:
            EngineRefusedError: texts and token ids are mixed.
        """
        given = [self.input] if isinstance(self.input, str) else self.input or []
        if given and all(isinstance(entry, int) for entry in given):
            return [list(given)]  # type: ignore[arg-type]
        if any(isinstance(entry, int) for entry in given):
            raise EngineRefusedError("input: token ids, or a list of texts or of lists of token ids")
        return given  # type: ignore[return-value]


class Classification(Struct):
    """One entry of `data` in a response."""

    index: int
    label: str | None
    probs: list[float]
    """One probability per class; logits if the request turns the activation off."""
    num_classes: int


class Usage(Struct):
    """Number of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ClassifyResponse(Struct, kw_only=True):
    """Response of `POST /classify`."""

    id: str = field(default_factory=lambda: f"classify-{uuid.uuid4().hex}")
    object: str = "list"
    created: int = field(default_factory=lambda: int(time.time()))
    model: str
    data: list[Classification]
    usage: Usage


_decoder = msgspec.json.Decoder(ClassifyRequest)


def decode_classify_request(body: bytes) -> ClassifyRequest:
    """Decode and check the body of `POST /classify`.

    Raises:
        EngineRefusedError: the request is malformed.
    """
    try:
        request = _decoder.decode(body)
    except ValueError as error:
        raise EngineRefusedError(f"bad request: {error}") from error
    if (request.messages is None) == (request.input is None):
        raise EngineRefusedError("bad request: exactly one of messages and input is required")
    return request


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
