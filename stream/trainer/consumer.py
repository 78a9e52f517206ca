"""Scored groups for any trainer: claim, train, commit, publish, checkpoint, in the order that loses nothing.

::

    async with connect(url, run) as connection, consume(connection, ledger_path, resume_point) as consumer:
        await consumer.publish(path, step, push)       # the version that engines sample with first
        while groups := await consumer.claim(8):
            ...                                        # train on [leased.group for leased in groups]
            await consumer.commit(groups, step)        # a ledger record each; not yet deleted from the server
            await consumer.publish(path, step, push)   # their capacity is free: rollout workers may claim more
            await consumer.checkpoint(save)            # save(resume_point) is durable, then they are deleted
        await consumer.finish("done")

A trainer that is killed at any moment resumes from the `ResumePoint` in its last checkpoint: groups in the ledger up to
that point are acknowledged without training, all others are leased again. `push` and `save` may block; they run in a
thread. `stream.trainer.consume` opens a consumer.
"""

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

import anyio
import structlog
from msgspec.structs import replace

from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.errors import LeaseLostError, NewerSchemaError, RecordError, RunFailedError
from stream.queue.lease import Lease
from stream.queue.stage import Claim, Stage
from stream.records import Group, TrainedCompletion
from stream.trainer.archive import Archive
from stream.trainer.leased_group import Checked, DroppedGroup, LeasedGroup, ResumePoint
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import (
    OPERATOR,
    AlreadyEnded,
    Dropped,
    Duplicate,
    LedgerOutcome,
    LedgerRecord,
    Trained,
    content_hash,
)
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from stream.waiting import cancel_on

log = structlog.get_logger()


class Consumer(Generic[Checked]):
    """A trainer's access to scored groups; made by `consume` or `open_consumer`.

    One task uses it; another one may `announce` a version meanwhile.

    Args:
        trainer_lease: the right to end groups and to publish.
        stage: the stage `scored`.
        ledger: cut to the resume point.
        resume: the point from which this trainer continues.
        check: called in a thread with each new group and the current policy version, once. Returns what the trainer
            wants to keep of it (`LeasedGroup.checked`), or `Dropped` or `DroppedGroup` to end it without training. A
            `RecordError` makes the entry a dead letter.
        archive: stores each group that ends; None: groups are not stored.
        stall_timeout_s: seconds for which `claim` waits for a group.
        requeued_groups: number of groups that ended after the resume point, and are therefore delivered again.
    """

    def __init__(
        self,
        trainer_lease: TrainerLease,
        stage: Stage,
        ledger: Ledger,
        resume: ResumePoint,
        check: Callable[[Group, int], Checked | Dropped | DroppedGroup],
        *,
        archive: Archive | None = None,
        stall_timeout_s: float = 600.0,
        requeued_groups: int = 0,
    ) -> None:
        self.trainer_lease = trainer_lease
        self.requeued_groups = requeued_groups
        self.connection: RunConnection = stage.connection
        self.ledger = ledger
        self.version = resume.version
        """The policy version of the trained weights: the one reserved last, or the resume point's if there is none."""
        self.step = resume.step
        """Steps committed so far."""
        self.buffer: dict[str, LeasedGroup[Checked]] = {}
        """Leased groups that `pop` has not returned yet, by prompt id."""
        self._in_step: dict[str, str] = {}
        """Ids of the entries that `pop` returned and `commit` has not ended yet, by prompt id."""
        self._copies: dict[str, Lease] = {}
        """Leases on copies of entries in `_in_step`, by entry id: a server that lost writes delivered them again."""
        self._stage = stage
        self._check = check
        self._archive = archive
        self._stall_timeout_s = stall_timeout_s
        self._committed: list[str] = []
        """Ids of entries ended since the last checkpoint."""
        self._unrecorded_outcomes: list[str] = []
        """Ids of entries of `unrecorded_outcomes` on the server that are in the ledger, but not durable there yet."""
        self._synced_bytes = ledger.resumed_bytes
        """Length of the ledger at the last `sync`, in bytes."""

    async def claim(self, count: int) -> list[LeasedGroup[Checked]]:
        """Return the groups of one step; wait while they are still being sampled or scored.

        Args:
            count: groups of one step.

        Returns:
            `count` groups in the order of their prompt ids; fewer if no more will come; none at the end of the run, or
            if the trainer was asked to stop (`connection.stopping` is set, and buffered groups are released).

        Raises:
            RunFailedError: no group came for `stall_timeout_s` while prompts are unfinished.
        """
        last = time.monotonic()
        while len(self.buffer) < count:
            claim = await self.poll(count - len(self.buffer))
            if self.connection.stopping.is_set():
                await self.release_all()
                return []
            if claim.leases or claim.paused:
                last = time.monotonic()
            if claim.leases:
                continue
            if self.is_drained(claim):
                break
            if time.monotonic() - last > self._stall_timeout_s:
                raise RunFailedError(
                    f"no scored group arrived within {self._stall_timeout_s:g} s, but "
                    f"{claim.unfinished_prompts} prompts are unfinished; `penstock queues` shows where they are"
                )
            await self.wait(claim)
        return self.pop(sorted(self.buffer)[:count])

    async def poll(self, count: int) -> Claim:
        """Claim up to `count` entries into `buffer`; never waits for any.

        Entries that cannot be read become dead letters. Groups whose prompt has an outcome in the ledger, older copies
        of a group, and groups that `check` drops end here.
        """
        if self.trainer_lease.lost_recovery:
            await self.trainer_lease.recover(self.ledger, has_checkpoint=True)
        claim = await self._stage.claim(count)
        ended: list[EndedGroup] = []
        for lease in claim.leases:
            ended += await self._receive(lease)
        await self._end(ended)
        return claim

    async def wait(self, claim: Claim, timeout_s: float = MAX_BLOCK_S) -> None:
        """Wait until another `poll` may return more than `claim` did, or until the trainer is asked to stop."""
        async with cancel_on(self.connection.stopping):
            await self._stage.wait(claim, timeout_s)

    def is_drained(self, claim: Claim) -> bool:
        """Whether every unfinished prompt of the run is in `buffer`: no other group will come."""
        return claim.feed_done and claim.unfinished_prompts <= len(self.buffer)

    def pop(self, prompt_ids: Collection[str]) -> list[LeasedGroup[Checked]]:
        """Remove these groups from the buffer and return them sorted by prompt id: arrival order must not matter."""
        groups = [self.buffer.pop(prompt_id) for prompt_id in sorted(prompt_ids)]
        self._in_step.update((leased.group.prompt.id, leased.lease.id) for leased in groups)
        return groups

    async def release_all(self) -> None:
        """Return all buffered groups to the queue without counting a failure."""
        leases = [*(leased.lease for leased in self.buffer.values()), *self._copies.values()]
        self.buffer.clear()
        self._copies.clear()
        for lease in leases:
            await _ignore_lost_lease(self._stage.release(lease, "none", ""))

    async def commit(
        self,
        groups: Sequence[LeasedGroup[Checked]],
        step: int,
        dropped: Mapping[str, str] | None = None,
        completions: Mapping[str, Sequence[TrainedCompletion]] | None = None,
    ) -> None:
        """Record the groups of a finished step: in the archive, in the ledger, then by a mark on the server.

        Their capacity is free once the next policy version is published.

        Args:
            groups: all groups of the step.
            step: its number; the first is 1.
            dropped: for groups that the step did not train after all, the reason, by prompt id.
            completions: what the step did with each completion of a group, except the greedy one, by prompt id;
                archived for `penstock show` and `penstock export-groups`.

        Raises:
            RunFailedError: the disk is full or fails; nothing is marked.
        """
        ended: list[tuple[LeasedGroup[Checked], LedgerOutcome]] = []
        for leased in groups:
            reason = (dropped or {}).get(leased.group.prompt.id)
            ended.append((leased, Trained() if reason is None else Dropped(reason)))
        await self._write_unrecorded_outcomes()
        await self._record(ended, step, completions, in_step=True)
        self.step = step
        for leased in groups:
            self._in_step.pop(leased.group.prompt.id, None)
        copies = [lease for lease in self._copies.values() if lease.prompt_id not in self._in_step]
        await self._end(
            [EndedGroup(leased.lease, outcome, in_step=True) for leased, outcome in ended]
            + [EndedGroup(lease, AlreadyEnded(self.ledger.outcomes[lease.prompt_id])) for lease in copies]
        )
        for lease in copies:
            del self._copies[lease.id]

    async def reserve_version(self, highest_known: int = -1) -> int:
        """Reserve a policy version number that was never used, above `highest_known`, and make it `version`."""
        self.version = await self.trainer_lease.reserve_version(max(highest_known, self.version))
        return self.version

    async def announce(self, version: int, path: Path, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Tell all workers that the engines have a policy version, and free the capacity of groups committed before.

        Args:
            version: from `reserve_version`.
            path: where its weights are.
            step: how many steps it has been trained.
            metrics: of the step, for `penstock queues`.
        """
        self.version = version
        await self.trainer_lease.publish(version, path, step, dict(metrics or {}))

    async def publish(
        self, path: Path | str, step: int, push: Callable[[int], None], metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Reserve a policy version, push it to the engines and announce it.

        Args:
            path: where its weights are, for people and for engines that start later.
            step: how many steps it has been trained.
            push: called in a thread with the version number; gives every engine the weights.
            metrics: of the step, for `penstock queues`.
        """
        version = await self.reserve_version()
        await anyio.to_thread.run_sync(push, version)
        await self.announce(version, Path(path), step, metrics)

    async def sync(self) -> ResumePoint:
        """Force archive and ledger to the disk and return the point that a checkpoint of this moment resumes from.

        Raises:
            RunFailedError: the disk fails.
        """
        await self._write_unrecorded_outcomes()
        self._synced_bytes = await anyio.to_thread.run_sync(self._sync)
        await self.trainer_lease.forget_unrecorded_outcomes(self._unrecorded_outcomes)
        self._unrecorded_outcomes.clear()
        return ResumePoint(
            ledger_bytes=self._synced_bytes,
            ledger_digest=self.ledger.digest(),
            version=self.version,
            step=self.step,
        )

    async def acknowledge(self) -> None:
        """Delete all committed groups from the server; call it when a checkpoint of the last `sync` is durable."""
        await self.trainer_lease.acknowledge(self._committed, self._synced_bytes)
        self._committed.clear()

    async def checkpoint(self, save: Callable[[ResumePoint], None]) -> None:
        """Save a checkpoint, then delete all committed groups from the server.

        Args:
            save: called in a thread, writes a checkpoint that holds the resume point. The checkpoint must be on the
                disk when it returns: temporary name, `fsync`, rename, `fsync` of the folder. If it raises, nothing is
                deleted.
        """
        resume_point = await self.sync()
        await anyio.to_thread.run_sync(save, resume_point)
        await self.acknowledge()

    async def finish(self, reason: str) -> None:
        """End the run: all other roles exit. Does nothing if the trainer was asked to stop, so that it can resume."""
        if not self.connection.stopping.is_set():
            await self.trainer_lease.renew()
            if self.trainer_lease.lost_recovery:
                raise RunFailedError("the server lost its last writes as the run ended; resume the run to end it")
            await self.trainer_lease.reconcile_server(self.ledger, self._synced_bytes)
            await self._record_dead_letters()
            await self.trainer_lease.finish_run(reason)

    async def _record_dead_letters(self) -> None:
        """Record dead letters that the ledger lacks: a server that lost writes may have forgotten a retry."""
        dead = await self.trainer_lease.read_dead_prompts()

        def write() -> None:
            for prompt, end in dead.items():
                if prompt not in self.ledger.dead:
                    self.ledger.append_end(prompt, end, self.step, self.version)
            self.ledger.sync()

        await anyio.to_thread.run_sync(write)

    async def _receive(self, lease: Lease) -> list[EndedGroup]:
        """Buffer one leased entry, and return the entries that end because of it."""
        try:
            group = await anyio.to_thread.run_sync(lease.group)
            prompt_id = group.prompt.id
            if prompt_id in self.ledger.outcomes:
                return [EndedGroup(lease, AlreadyEnded(self.ledger.outcomes[prompt_id]))]
            if prompt_id in self._in_step:
                if lease.id != self._in_step[prompt_id]:
                    self._copies[lease.id] = lease
                return []
            buffered = self.buffer.get(prompt_id)
            if buffered is not None and buffered.lease.id == lease.id:
                # The lease had run out while this process was suspended or offline; this process has claimed it again.
                self.buffer[prompt_id] = replace(buffered, lease=lease, group=group)
                return []
            checked = await anyio.to_thread.run_sync(self._check, group, self.version)
        except NewerSchemaError as error:
            await _ignore_lost_lease(self._stage.release(lease, "none", str(error)))
            return []
        except RecordError as error:
            await _ignore_lost_lease(self._stage.dead_letter(lease, "unreadable", str(error)))
            return []
        return await self._accept(lease, group, checked)

    async def _accept(self, lease: Lease, group: Group, checked: Checked | Dropped | DroppedGroup) -> list[EndedGroup]:
        """Buffer a new group, or drop it; an older copy in the buffer ends as a duplicate either way.

        The newer copy counts, because the server certainly knows it: a server that lost its last writes may have
        forgotten the older one.
        """
        ended = []
        older = self.buffer.pop(group.prompt.id, None)
        if isinstance(checked, Dropped | DroppedGroup):
            outcome = Dropped(checked.reason)
            completions = {group.prompt.id: checked.completions} if isinstance(checked, DroppedGroup) else None
            await self._record([(LeasedGroup(lease, group, None), outcome)], self.step + 1, completions)
            ended.append(EndedGroup(lease, outcome))
        else:
            self.buffer[group.prompt.id] = LeasedGroup(lease, group, checked)
        if older is not None:
            log.warning("group.duplicate", prompt=group.prompt.id)
            ended.append(EndedGroup(older.lease, Duplicate(lease.id)))
        return ended

    async def _record(
        self,
        ended: Sequence[tuple[LeasedGroup[Any], LedgerOutcome]],
        step: int,
        completions: Mapping[str, Sequence[TrainedCompletion]] | None = None,
        *,
        in_step: bool = False,
    ) -> None:
        """Write groups to the archive, then to the ledger: readers find each group of the ledger in the archive."""

        def write() -> None:
            records = [
                LedgerRecord(leased.group.prompt.id, outcome, step, self.version, content_hash(leased.group), in_step)
                for leased, outcome in ended
            ]
            if self._archive is not None:
                payloads = [leased.lease.record() for leased, _ in ended]
                self._archive.write(zip(records, payloads, strict=True), completions)
            self.ledger.append(records)

        await anyio.to_thread.run_sync(write)

    async def _write_unrecorded_outcomes(self) -> None:
        """Record in the ledger what ended without this trainer: dead letters, and what an operator did with them."""
        last = self._unrecorded_outcomes[-1] if self._unrecorded_outcomes else ""
        for entry, prompt, end in await self.trainer_lease.read_unrecorded_outcomes(last):
            if end == Dropped(OPERATOR) and (prompt in self._in_step or prompt in self.buffer):
                continue  # a server that lost writes also delivered the prompt; when its step ends, the drop is undone
            await anyio.to_thread.run_sync(self.ledger.append_end, prompt, end, self.step, self.version)
            self._unrecorded_outcomes.append(entry)

    async def _end(self, ended: Sequence[EndedGroup]) -> None:
        """Mark entries as ended on the server."""
        if ended:
            lost = set(await self.trainer_lease.commit(self._stage, ended, self.version + 1))
            self._committed += [group.lease.id for group in ended if group.lease.id not in lost]

    def _sync(self) -> int:
        if self._archive is not None:
            self._archive.sync()
        return self.ledger.sync()


async def _ignore_lost_lease(ending: Awaitable[object]) -> None:
    """End a lease that may be lost already; if so, its next holder ends the entry in the same way."""
    try:
        await ending
    except LeaseLostError as error:
        log.warning("lease.lost", why=str(error))
