"""Answers that outlive their connection: a request that is repeated gets the turn that was sampled for the first one.

A program whose stream breaks asks again, and does not always say so. Sampled twice, one of the turns would be read by
nobody. So a turn is sampled to its end also after its connection broke, and kept for the same request.

An answer that was written to its end may still be cut behind this process. Of programs that repeat a request only after
such a loss (`RequestSource.repeats_lost`), the same request with nothing between gets the answer once more.
"""

import hashlib
from typing import Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from stream.errors import EngineRefusedError
from workers.rollout.agent_endpoint.neutral import ModelReply, ModelRequest
from workers.rollout.agent_endpoint.recorder import Recorder

_KEPT_S: Final = 30.0
"""How long an answer that nobody read to its end waits for the same request; then the request is sampled anew."""
_MAX_KEY: Final = 200
"""Characters of an idempotency key that count."""


class Answer:
    """A turn that is being sampled, or was.

    Attributes:
        is_delivered: all of it was written to a connection.
        is_repeated: it was given once more after that.
        readers: requests that wait for it, or are being sent it.
        error: why there is none.
        ended_at: by the event loop's clock; None before.
    """

    def __init__(self) -> None:
        self.is_delivered = self.is_repeated = False
        self.readers = 0
        self.error: Exception | None = None
        self.ended_at: float | None = None
        self._done = anyio.Event()
        self._reply: ModelReply | None = None

    async def wait(self) -> ModelReply:
        """Return the turn once it is sampled.

        Raises:
            EngineError: it could not be sampled.
        """
        await self._done.wait()
        if self._reply is None:
            raise self.error or EngineRefusedError("the episode is over")
        return self._reply

    async def sample(self, recorder: Recorder, request: ModelRequest) -> None:
        """Sample the turn; never raises, but if it is cancelled."""
        try:
            self._reply = await recorder.complete(request)
        except Exception as error:  # noqa: BLE001  (`wait` raises it)
            self.error = error
        finally:
            self.ended_at = anyio.current_time()
            self._done.set()


class Answers:
    """The answers of one episode.

    Args:
        recorder: of the episode.
        tasks: in which turns are sampled; it ends with the episode.
        context_length: tokens that an engine takes; 0 if it is not known.
    """

    def __init__(self, recorder: Recorder, tasks: TaskGroup, context_length: int = 0) -> None:
        self.recorder, self.context_length = recorder, context_length
        self._tasks = tasks
        self._last: dict[bytes, Answer] = {}
        self._named: dict[tuple[str, bytes], Answer] = {}
        self._latest: dict[str, tuple[bytes, Answer]] = {}
        """The latest request of each conversation, by the program's name for it, and its answer."""

    def get(self, request: ModelRequest) -> Answer:
        """Return the answer to a request: that of an earlier one which it repeats, or a new one."""
        digest = _digest(request)
        key = (request.idempotency_key[:_MAX_KEY], digest)
        named = self._named.get(key)
        known = named or self._last.get(digest)
        if known is not None and known.error is None and (named or request.is_retry or _is_lost(known)):
            return known
        if (cut := self._find_cut(request, digest)) is not None:
            cut.is_repeated = True
            return cut
        answer = self._last[digest] = Answer()
        self._latest[request.source.name] = digest, answer
        if request.idempotency_key:
            self._named[key] = answer
        # In a task of its own, since the server cancels a handler whose connection breaks.
        self._tasks.start_soon(answer.sample, self.recorder, request)
        return answer

    def _find_cut(self, request: ModelRequest, digest: bytes) -> Answer | None:
        """Return the answer that a program must have lost, since it repeats its request."""
        latest, answer = self._latest.get(request.source.name, (b"", None))
        if answer is None or latest != digest or not request.source.repeats_lost:
            return None
        is_lost = answer.error is None and not answer.is_repeated and _is_kept(answer)
        return answer if is_lost else None


def _is_lost(answer: Answer) -> bool:
    """Whether nobody got this answer, and nobody is getting it."""
    return _is_kept(answer) and not answer.is_delivered and not answer.readers


def _is_kept(answer: Answer) -> bool:
    return answer.ended_at is None or anyio.current_time() - answer.ended_at < _KEPT_S


def _digest(request: ModelRequest) -> bytes:
    try:
        asked = msgspec.msgpack.encode([request.messages, request.tools])
    except (ValueError, OverflowError, RecursionError) as error:
        raise EngineRefusedError(f"the request holds values that a record cannot hold: {error}") from error
    return hashlib.blake2b(asked, digest_size=16).digest()
