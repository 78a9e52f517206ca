"""What a group's end leaves behind: the group in the archive, a ledger line, and a mark on the server.

The mark stays until a checkpoint is durable. By then line and group are, the group first: whoever believes the ledger
finds what it speaks of.
"""

from collections.abc import Sequence

import anyio
from msgspec import Struct

from stream.queue.stage import Lease, Stage
from stream.records import Group
from stream.trainer.archive import Archive
from stream.trainer.lease import GroupOutcome, TrainerLease
from stream.trainer.ledger import Ledger, LedgerRecord, content_hash


class EndedGroup(Struct, frozen=True):
    """One group's end."""

    lease: Lease
    outcome: str
    """As `stream.trainer.lease.End` has it."""
    group: Group | None
    """None where the end is no new one, and leaves no line."""


class OutcomeRecorder:
    """The trainer's books of what has ended.

    Args:
        ledger: the run's.
        trainer_lease: the right to end groups.
        stage: where they were leased.
        archive: the run's; None where groups are not kept.
    """

    def __init__(
        self, ledger: Ledger, trainer_lease: TrainerLease, stage: Stage, archive: Archive | None = None
    ) -> None:
        self.ledger = ledger
        self._trainer_lease = trainer_lease
        self._stage = stage
        self._archive = archive
        self._marked: list[str] = []
        """Entries ended since the last checkpoint."""

    async def record(self, ended: Sequence[EndedGroup], step: int, version: int, *, in_step: bool = False) -> None:
        """Write down and mark the end of groups; those trained give their place back with the next version.

        Args:
            ended: the groups.
            step: the optimizer step that they were part of, or that comes after them.
            version: the policy version now.
            in_step: the step had room for them, so those that it dropped give their place back as if trained.

        Raises:
            RunFailedError: the disk is full, or refuses; nothing is marked.
        """
        if not ended:
            return
        await anyio.to_thread.run_sync(self._write, ended, step, version)
        lost = set(
            await self._trainer_lease.commit(
                self._stage, [GroupOutcome(e.lease, e.outcome, in_step) for e in ended], version + 1
            )
        )
        self._marked += [e.lease.id for e in ended if e.lease.id not in lost]

    async def sync(self) -> int:
        """Make all that has ended so far durable. Returns the ledger's length in bytes, for the checkpoint.

        Raises:
            RunFailedError: the disk refuses.
        """
        return await anyio.to_thread.run_sync(self._sync)

    async def acknowledge(self) -> None:
        """Let the server forget what has ended: a checkpoint that holds it is durable."""
        await self._trainer_lease.acknowledge(self._marked)
        self._marked.clear()

    def _write(self, ended: Sequence[EndedGroup], step: int, version: int) -> None:
        """Group by group as it came, then the lines."""
        lines = [
            (LedgerRecord(e.group.prompt.id, e.outcome, step, version, content_hash(e.group)), e.lease.payload)
            for e in ended
            if e.group
        ]
        if self._archive is not None:
            self._archive.write(lines)
        self.ledger.append([line for line, _ in lines])

    def _sync(self) -> int:
        if self._archive is not None:
            self._archive.sync()
        return self.ledger.sync()
