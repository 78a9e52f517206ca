"""The thread that owns a classifier: everything that waits is scored together, pass after pass."""

from collections.abc import Callable
from queue import Empty, SimpleQueue

import structlog
import torch
from torch import Tensor

from stream.errors import EngineError
from workers.local_engine.pooling.classifier import Classifier

log = structlog.get_logger()

MAX_SEQUENCES_PER_ROUND = 512
"""Sequences taken together; more wait for the next round, so that nobody waits for all of a flood."""


class PoolingRequest:
    """Sequences of one request while they wait. The thread owns it until `done` is called on the loop."""

    __slots__ = ("error", "is_cancelled", "logits", "sequences", "wake")

    def __init__(self, sequences: list[list[int]], wake: Callable[[], None]) -> None:
        self.sequences = sequences
        self.wake = wake
        self.logits: Tensor | None = None
        """[sequences, classes], once it is done."""
        self.error: EngineError | None = None
        self.is_cancelled = False
        """Nobody waits for it any more."""


class PoolingThread:
    """The loop and its mailbox.

    Args:
        model: scores; this thread's alone.
        deliver: hands finished requests back to the event loop.
        on_failure: called once, when scoring has failed for good.
    """

    def __init__(
        self, model: Classifier, deliver: Callable[[list[PoolingRequest]], object], on_failure: Callable[[], object]
    ) -> None:
        self.failure: Exception | None = None
        """What ended scoring for good."""
        self.tokens_read = 0
        self.running = 0
        """Sequences in the pass that goes on."""
        self._model = model
        self._deliver = deliver
        self._on_failure = on_failure
        self._mailbox: SimpleQueue[PoolingRequest | None] = SimpleQueue()
        self._stopping = False

    @property
    def waiting(self) -> int:
        """Requests that are not being worked on yet."""
        return self._mailbox.qsize()

    def submit(self, request: PoolingRequest) -> None:
        """Hand over a request."""
        self._mailbox.put(request)

    def stop(self) -> None:
        """Let `run` return soon; what is unfinished is answered with an error."""
        self._stopping = True
        self._mailbox.put(None)

    def run(self, threads: int) -> None:
        """Score until `stop`; the body of the thread."""
        torch.set_num_threads(threads)
        while not self._stopping:
            taken = self._take()
            try:
                self._score(taken)
            except Exception as error:  # whatever it is: /health reports it, and no request may hang
                log.exception("engine.failed")
                self.failure = error
                self._on_failure()
                self._reject(taken, f"scoring has failed: {error!r}; restart the server")
                break
        while not self._stopping:
            self._reject(self._take(), f"scoring has failed: {self.failure!r}; restart the server")
        self._reject(self._drain_mailbox(), "the server is shutting down")

    def _take(self) -> list[PoolingRequest]:
        """Wait for a request, and take what has come besides."""
        first = self._mailbox.get()
        taken = [] if first is None else [first]
        count = sum(len(request.sequences) for request in taken)
        while count < MAX_SEQUENCES_PER_ROUND:
            try:
                request = self._mailbox.get_nowait()
            except Empty:
                break
            if request is not None:
                taken.append(request)
                count += len(request.sequences)
        return [request for request in taken if not request.is_cancelled]

    def _drain_mailbox(self) -> list[PoolingRequest]:
        rest = []
        while not self._mailbox.empty():
            request = self._mailbox.get()
            if request is not None:
                rest.append(request)
        return rest

    def _score(self, taken: list[PoolingRequest]) -> None:
        sequences = [ids for request in taken for ids in request.sequences]
        if not sequences:
            return
        self.running = len(sequences)
        logits_NC = self._model.score(sequences)
        self.running = 0
        self.tokens_read += sum(map(len, sequences))
        start = 0
        for request in taken:
            end = start + len(request.sequences)
            request.logits, start = logits_NC[start:end], end
        self._deliver(taken)

    def _reject(self, requests: list[PoolingRequest], why: str) -> None:
        for request in requests:
            request.error = EngineError(why)
        if requests:
            self._deliver(requests)
