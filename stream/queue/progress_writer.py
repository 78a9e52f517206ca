"""Saves the progress of unfinished groups, for the attempt that follows if this worker dies.

Whatever waits is written together, in one round trip, since one costs a worker as much as saving many turns. So at
most a hundred are made in a second, and finished completions wait for their group to end, when they need not be saved.
An episode that must not go on before its turn is saved waits for its batch; nothing else waits. What a server without
memory, or without an answer within a lease time, does not take is given up: the group goes on, and after a kill more is
sampled again.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import anyio
import msgspec
import structlog

from stream.codec import encode
from stream.errors import PenstockError, RecordError
from stream.queue.lease import Lease
from stream.queue.stage import Stage

log = structlog.get_logger()

_INTERVAL_S: Final = 0.01
"""At least, between the beginnings of two round trips."""
_COMPLETION_DELAY_S: Final = 0.5
_MAX_BYTES: Final = 1_000_000
"""Of one script, unless a single part is larger: it takes about a microsecond for each kilobyte."""


class ProgressPart(msgspec.Struct, frozen=True, kw_only=True):
    """Something to save; `stream/lua/save_progress.lua` describes the fields."""

    what: Literal["turn", "completion", "resumed"]
    field: str
    record: msgspec.Struct | bytes
    """Encoded only when it is written; a part that is given up before costs nothing."""
    number: int = 0
    names: Sequence[str] = ()

    def arguments(self, entry_id: str) -> tuple[bytes | int | str, ...]:
        """Return the part as the script takes it."""
        record = self.record if isinstance(self.record, bytes) else encode(self.record)
        return (entry_id, self.what, self.field, record, self.number, len(self.names), *self.names)


class ProgressBatch:
    """Parts that are written together.

    Attributes:
        is_saved: whether the server has taken them; known after `wait`.
    """

    def __init__(self) -> None:
        self.is_saved = False
        self.parts: defaultdict[str, list[ProgressPart]] = defaultdict(list)
        """By the id of their entry."""
        self._ended = anyio.Event()

    async def wait(self) -> bool:
        """Wait until the parts are saved, or given up; return whether they are saved."""
        if not self._ended.is_set():
            await self._ended.wait()
        return self.is_saved

    def end(self, *, is_saved: bool) -> None:
        """Note the result."""
        self.is_saved = is_saved
        self._ended.set()


class ProgressWriter:
    """Saves parts of the groups of one stage's leases.

    What waits is bounded by the episodes in flight: none has two turns that are not saved, or two results.

    Args:
        stage: whose leases.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._soon, self._later = ProgressBatch(), ProgressBatch()
        self._later_at = math.inf
        """When `_later` is written, by the event loop's clock."""
        self._has_parts, self._urgent = anyio.Event(), anyio.Event()
        self._is_refused = False

    def put(self, lease: Lease, part: ProgressPart, *, is_urgent: bool = True) -> ProgressBatch:
        """Save a part; wait for the batch that is returned if it matters when.

        Args:
            lease: of the group.
            part: to save.
            is_urgent: it is not a finished completion whose turns are saved, which may wait for its group.
        """
        batch = self._soon if is_urgent else self._later
        batch.parts[lease.id].append(part)
        self._has_parts.set()
        if is_urgent:
            self._urgent.set()
        elif self._later_at == math.inf:
            self._later_at = anyio.current_time() + _COMPLETION_DELAY_S
        return batch

    async def forget(self, lease: Lease) -> None:
        """Give up what waits for a group that is whole: its entry ends, and with it all that was saved.

        How its completions were restored is written before.
        """
        self._later.parts.pop(lease.id, None)
        batch, parts = self._soon, self._soon.parts.pop(lease.id, [])
        if counted := [part for part in parts if part.what == "resumed"]:
            batch.parts[lease.id] = counted
            await batch.wait()

    async def run(self) -> None:
        """Write until cancelled; run it in the worker's task group."""
        began = -math.inf
        while True:
            await self._has_parts.wait()
            with anyio.move_on_after(self._later_at - anyio.current_time()):
                await self._urgent.wait()
                await anyio.sleep_until(began + _INTERVAL_S)
            began = anyio.current_time()
            self._urgent = anyio.Event()
            batches = [self._soon]
            self._soon = ProgressBatch()
            if anyio.current_time() >= self._later_at:
                batches.append(self._later)
                self._later, self._later_at = ProgressBatch(), math.inf
            if self._later_at == math.inf:
                self._has_parts = anyio.Event()
            for batch in batches:  # in this order: a completion replaces turns that are saved
                batch.end(is_saved=await self._write(batch))

    async def _write(self, batch: ProgressBatch) -> bool:
        is_saved = True
        for arguments in _calls(batch):
            is_saved = await self._save(arguments) and is_saved
        return is_saved

    async def _save(self, arguments: Sequence[bytes | int | str]) -> bool:
        """Run the script once; progress is optional, so a server that does not take it is no error."""
        why = "the server did not answer within a lease time"
        try:
            with anyio.move_on_after(self.stage.retry_policy.lease_s):
                if await self.stage.save_progress(arguments):
                    self._is_refused = False
                    return True
                why = "the server is short of memory"
        except PenstockError as error:
            why = str(error)
        if not self._is_refused:
            log.warning("progress.refused", stage=self.stage.name, why=why)
        self._is_refused = True
        return False


def _calls(batch: ProgressBatch) -> Iterator[list[bytes | int | str]]:
    """Return the arguments of the scripts that a batch takes."""
    arguments: list[bytes | int | str] = []
    size = 0
    for entry_id, parts in batch.parts.items():
        for part in parts:
            try:
                one = part.arguments(entry_id)
            except RecordError as error:  # the group fails with it, too
                log.warning("progress.refused", entry=entry_id, why=str(error))
                continue
            length = sum(len(value) for value in one if isinstance(value, bytes))
            if arguments and size + length > _MAX_BYTES:
                yield arguments
                arguments, size = [], 0
            arguments += one
            size += length
    if arguments:
        yield arguments
