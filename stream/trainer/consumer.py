"""Scored groups for a trainer of any make: the verbs of `stream.trainer.lease` in the order in which they hold.

::

    async with connect(url, run) as link, consume(link, ledger_path, ledger_bytes, version) as consumer:
        await consumer.publish(path, step, push)        # what the engines sample with first
        while taken := await consumer.take(8):
            ...                                         # train
            await consumer.mark(taken, step)            # no longer outstanding, not yet forgotten
            await consumer.publish(path, step, push)    # their places come free
            await consumer.keep(save)                   # a checkpoint is durable, the server may forget
        await consumer.finish("done")

Killed at any moment, it begins again from its checkpoint, which holds `ledger_bytes` and `version`: what the ledger
holds up to there is acknowledged without training, everything after it comes again. What may block (`push`, `save`)
runs in a thread.
"""

import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import structlog
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.errors import LeaseLostError, NewerSchemaError, RecordError, RunFailedError
from stream.queue.stage import Lease, RetryPolicy, Stage
from stream.records import Group
from stream.trainer.folder_lock import RunFolderLock, last_token
from stream.trainer.lease import GroupOutcome, TrainerLease
from stream.trainer.ledger import Ledger, LedgerRecord, content_hash

log = structlog.get_logger()


class LeasedGroup(Struct, frozen=True, eq=False):
    """A group in hand."""

    lease: Lease
    group: Group


class Consumer:
    """The trainer's end of the pipe; made by `consume`. One task uses it."""

    def __init__(self, tenure: TrainerLease, stage: Stage, ledger: Ledger, version: int, stall_s: float) -> None:
        self.version = version
        """The policy version that was published last; before that, the highest that was known of."""
        self._trainer_lease = tenure
        self._stage = stage
        self._ledger = ledger
        self._stall_s = stall_s
        self._marked: list[str] = []

    async def claim(self, count: int) -> list[LeasedGroup]:
        """Take groups into hand, and wait for those that are still on their way.

        What the ledger holds already is ended without being handed out, a second copy is held back, what cannot be read
        becomes a dead letter.

        Args:
            count: groups of one step. Fewer come where no more will: all prompts have met their end but these.

        Returns:
            The groups, in the order of their prompts' ids; none at the end of the run, or where it was asked to stop
            (then `Link.stopping` is set).

        Raises:
            RunFailedError: nothing came for `stall_s`, while prompts are without an end.
        """
        hand: dict[str, LeasedGroup] = {}
        last = time.monotonic()
        while len(hand) < count:
            claim = await self._stage.claim(count - len(hand))
            await self._classify(claim.leases, hand)
            if self._stage.connection.stopping.is_set():
                await self._give_back(hand)
                return []
            if claim.leases or claim.paused:
                last = time.monotonic()
            if claim.leases:
                continue
            if claim.feed_done and claim.unfinished_prompts <= len(hand):
                break
            if time.monotonic() - last > self._stall_s:
                raise RunFailedError(
                    f"no group came to be trained for {self._stall_s:g} s, while {claim.unfinished_prompts} prompts have met "
                    "no end; `penstock queues` shows where they are"
                )
            await self._stage.wait(claim)
        return [hand[prompt] for prompt in sorted(hand)]

    async def commit(self, groups: Sequence[LeasedGroup], step: int, dropped: Mapping[str, str] | None = None) -> None:
        """Say that groups have ended: a line of the ledger each, then a mark on the server.

        Args:
            groups: the groups of a step that is done.
            step: its number; the first is 1.
            dropped: why some of them were not trained after all, by prompt id.
        """
        ends = {t.group.prompt.id: "trained" for t in groups}
        ends |= {prompt: f"dropped:{reason}" for prompt, reason in (dropped or {}).items()}
        lines = [
            LedgerRecord(t.group.prompt.id, ends[t.group.prompt.id], step, self.version, content_hash(t.group))
            for t in groups
        ]
        await anyio.to_thread.run_sync(self._ledger.append, lines)
        await self._end([GroupOutcome(t.lease, ends[t.group.prompt.id]) for t in groups])

    async def publish(
        self,
        path: Path | str,
        step: int,
        push: Callable[[int], None],
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish a policy version, under a number never used before; places of groups marked before it come free.

        Args:
            path: where its weights lie, for people and for engines that start later.
            step: how many steps it has been trained.
            push: called with the number, gives every engine the weights; once it has returned, everybody counts on it.
            metrics: of the step, for `penstock queues`.
        """
        version = await self._trainer_lease.reserve_version(self.version)
        await anyio.to_thread.run_sync(push, version)
        self.version = version
        await self._trainer_lease.publish(version, Path(path), step, dict(metrics or {}))

    async def checkpoint(self, save: Callable[[int, int], None]) -> None:
        """Make a checkpoint durable, then let the server forget what has been marked.

        Args:
            save: called with the ledger's length in bytes and the version published last, writes a checkpoint that
                holds both. It must be on the disk when it returns: temporary name, `fsync`, rename, `fsync` of the
                folder. Where it raises, nothing is acknowledged.
        """
        length = await anyio.to_thread.run_sync(self._ledger.sync)
        await anyio.to_thread.run_sync(save, length, self.version)
        await self._trainer_lease.acknowledge(self._marked)
        self._marked.clear()

    async def finish(self, reason: str) -> None:
        """End the run: all other roles go home. Nothing where it was merely asked to stop, and is to be resumed."""
        if not self._stage.connection.stopping.is_set():
            await self._trainer_lease.reconcile_server(self._ledger)
            await self._trainer_lease.finish_run(reason)

    async def _classify(self, leases: Sequence[Lease], hand: dict[str, LeasedGroup]) -> None:
        ends: list[GroupOutcome] = []
        for lease in leases:
            try:
                group = lease.group()
                before = hand.get(group.prompt.id)
                if group.prompt.id in self._ledger.outcomes:
                    ends.append(GroupOutcome(lease, f"already:{self._ledger.outcomes[group.prompt.id]}"))
                else:  # a new one, one that had slipped from our hand while we were suspended, or a younger copy of one
                    hand[group.prompt.id] = LeasedGroup(lease, group)
                    if before is not None and before.lease.id != lease.id:
                        ends.append(GroupOutcome(before.lease, f"duplicate:{lease.id}"))
            except NewerSchemaError as error:
                await _ignore_lost_lease(self._stage.release(lease, "none", str(error)))
            except RecordError as error:
                await _ignore_lost_lease(self._stage.dead_letter(lease, "unreadable", str(error)))
        await self._end(ends)

    async def _end(self, ends: Sequence[GroupOutcome]) -> None:
        if ends:
            lost = set(await self._trainer_lease.commit(self._stage, ends, self.version + 1))
            self._marked += [end.lease.id for end in ends if end.lease.id not in lost]

    async def _give_back(self, hand: Mapping[str, LeasedGroup]) -> None:
        for taken in hand.values():
            await _ignore_lost_lease(self._stage.release(taken.lease, "none", ""))


@asynccontextmanager
async def consume(
    connection: RunConnection,
    ledger: Path,
    ledger_bytes: int,
    version: int,
    *,
    lease_s: float = 15.0,
    stall_s: float = 600.0,
) -> AsyncIterator[Consumer]:
    """Become the run's trainer, from a checkpoint, for as long as the context is open.

    Args:
        connection: the run's connection.
        ledger: the file; `ledger.jsonl` in the run's folder, where the feeder and `penstock audit` look for it.
        ledger_bytes: its length, says the checkpoint; 0 where there is none. What lies behind is cut off.
        version: the highest policy version that the checkpoint, or an engine, knows of; -1 where there is none.
        lease_s: a trainer that is silent for so long is succeeded, and its groups go to the next.
        stall_s: how long `Consumer.claim` waits for a group.

    Raises:
        FencedError: a living trainer holds the run, or, later, has taken it over.
        RunMismatchError: ledger, checkpoint and server do not tell of the same run.
    """
    async with anyio.create_task_group() as tasks:
        known = await anyio.to_thread.run_sync(last_token, ledger.parent)
        tenure = await TrainerLease.acquire(connection, lease_s, min_token=known)
        tasks.start_soon(tenure.renew_forever)
        fence = await anyio.to_thread.run_sync(RunFolderLock.acquire, ledger.parent, tenure.token)
        book = await anyio.to_thread.run_sync(Ledger, ledger, ledger_bytes, fence)  # not before: it was another's
        try:
            again = await tenure.recover(book)
            name = f"consumer-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
            stage = Stage(connection, "scored", name, RetryPolicy(lease_s=lease_s))
            tasks.start_soon(stage.renew_leases)
            log.info("consumer.started", consumer=name, ended=len(book.outcomes), groups_again=again)
            yield Consumer(tenure, stage, book, version, stall_s)
            await tenure.release()
        finally:
            book.close()
        tasks.cancel_scope.cancel()


async def _ignore_lost_lease(ending: Awaitable[object]) -> None:
    """End a lease that may be lost already; whoever has it now will find the same."""
    try:
        await ending
    except LeaseLostError as error:
        log.warning("lease.lost", why=str(error))
