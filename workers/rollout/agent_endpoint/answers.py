"""Answers that outlive their connection: a request that is repeated gets the turn that was sampled for the first one.

A program whose stream breaks asks again, and does not always say so. Sampled twice, one of the turns would be read by
nobody. So a turn is sampled to its end also after its connection broke, and kept for the same request.

An answer that was written to its end may still be cut behind this process. Of programs that repeat a request only after
such a loss (`RequestSource.repeats_lost`), the same request with nothing between gets the answer once more.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import msgspec
from aiohttp import web

from stream.errors import EngineRefusedError
from workers.rollout.agent_endpoint.neutral import ModelReply, ModelRequest, RequestRefusedError
from workers.rollout.agent_endpoint.recorder import Recorder

_KEPT_S: Final = 30.0
"""How long an answer that nobody read to its end waits for the same request; then the request is sampled anew."""
_READ_AT_ONCE: Final = 4
"""Bodies of an episode that are read at once; others wait at their connections."""
_MAX_HELD: Final = 256 << 20
_MAX_KEY: Final = 200
"""Characters of an idempotency key that count."""


class Answer:
    """A turn that is being sampled, or was.

    Attributes:
        is_delivered: all of it was written to a connection.
        is_repeated: it was given once more after that.
        readers: requests that wait for it, or are being sent it; the connections of some may be lost.
        error: why there is none.
        ended_at: by the event loop's clock; None before.
    """

    def __init__(self) -> None:
        self.is_delivered = self.is_repeated = False
        self.readers: list[web.Request] = []
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

    async def sample(self, recorder: Recorder, request: ModelRequest) -> ModelReply:
        """Sample the turn, and return it.

        Raises:
            EngineError: it could not be sampled.
        """
        try:
            self._reply = await recorder.complete(request)
        except Exception as error:
            self.error = error
            raise
        finally:
            self.ended_at = anyio.current_time()
            self._done.set()
        return self._reply


class Answers:
    """The answers of one episode.

    Args:
        recorder: of the episode.
        context_length: tokens that an engine takes; 0 if it is not known.

    Attributes:
        reading: bodies that are being read.
    """

    def __init__(self, recorder: Recorder, context_length: int = 0) -> None:
        self.recorder, self.context_length = recorder, context_length
        self.reading = anyio.Semaphore(_READ_AT_ONCE, fast_acquire=True)
        self._held = 0
        """Bytes of the bodies of requests that are being answered."""
        self._last: dict[bytes, Answer] = {}
        self._named: dict[tuple[str, bytes], Answer] = {}
        self._latest: dict[str, tuple[bytes, Answer]] = {}
        """The latest request of each conversation, by the program's name for it, and its answer."""

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Hold a body of this size in bytes: a program must not use up its worker's memory.

        Raises:
            RequestRefusedError: requests of this episode hold too much.
        """
        if self._held and self._held + size > _MAX_HELD:
            raise RequestRefusedError(f"requests that are being answered hold more than {_MAX_HELD >> 20} MB")
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    def get(self, request: ModelRequest) -> tuple[Answer, bool]:
        """Return the answer to a request, and whether it is a new one, which is to be sampled."""
        digest = _digest(request)
        key = (request.idempotency_key[:_MAX_KEY], digest)
        named = self._named.get(key)
        known = named or self._last.get(digest)
        if known is not None and known.error is None and (named or request.is_retry or _is_lost(known)):
            return known, False
        if (cut := self._find_cut(request, digest)) is not None:
            cut.is_repeated = True
            return cut, False
        answer = self._last[digest] = Answer()
        self._latest[request.source.name] = digest, answer
        if request.idempotency_key:
            self._named[key] = answer
        return answer, True

    def _find_cut(self, request: ModelRequest, digest: bytes) -> Answer | None:
        """Return the answer that a program must have lost, since it repeats its request."""
        latest, answer = self._latest.get(request.source.name, (b"", None))
        if answer is None or latest != digest or not request.source.repeats_lost:
            return None
        is_lost = answer.error is None and not answer.is_repeated and _is_kept(answer)
        return answer if is_lost else None


def _is_lost(answer: Answer) -> bool:
    """Whether nobody got this answer, and nobody is getting it."""
    has_reader = any(reader.transport is not None for reader in answer.readers)
    return _is_kept(answer) and not answer.is_delivered and not has_reader


def _is_kept(answer: Answer) -> bool:
    return answer.ended_at is None or anyio.current_time() - answer.ended_at < _KEPT_S


def _digest(request: ModelRequest) -> bytes:
    try:
        asked = msgspec.msgpack.encode([request.messages, request.tools])
    except (ValueError, OverflowError, RecursionError) as error:
        raise EngineRefusedError(f"the request holds values that a record cannot hold: {error}") from error
    return hashlib.blake2b(asked, digest_size=16).digest()
