"""The thread that owns a classifier. It scores all waiting requests together, in rounds."""

from collections.abc import Callable
from queue import Empty
from typing import ClassVar

from torch import Tensor

from stream.errors import EngineError
from workers.local_engine.model_thread import ModelThread
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
