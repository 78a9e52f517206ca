"""The trainer's lease on a run, and the verbs that need it.

A run has one trainer. Each trainer gets a fencing token, larger than all tokens before; scripts that change the run
on a trainer's behalf check it, so a trainer that was replaced cannot change anything::

    lease = await TrainerLease.acquire(connection, lease_s)    # FencedError if another trainer is alive
    await lease.recover(ledger)                                # groups that the checkpoint lacks are delivered again
    ...
    await lease.commit(stage, ended, release_version=version + 1)    # groups are marked with their outcome
    version = await lease.reserve_version(known)               # a version number that was never used
    await lease.publish(version, path, step, metrics)          # after the engines have it
    await lease.acknowledge(entry_ids, ledger_bytes)           # after the checkpoint is durable

`stream.trainer.consumer.Consumer` calls these in the right order.
"""

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.errors import FencedError, RunMismatchError
from stream.queue.entry_scan import scan_dead_entries
from stream.queue.lease import Lease
from stream.queue.stage import Stage
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_ends import upload_ends
from stream.trainer.ledger_records import Dead, GroupOutcome, LedgerEntry, decode_outcome, encode_outcome
from stream.trainer.recovery_facts import RecoveryFacts, archived_prompts

log = structlog.get_logger()

_CHUNK = 500


class EndedGroup(Struct, frozen=True):
    """A leased group and its outcome."""

    lease: Lease
    outcome: GroupOutcome
    in_step: bool = False
    """The group was part of an optimizer step. Its capacity is then freed by the next published version even if the
    step dropped it. Freed immediately, more groups would be started with this version than can be trained in time."""


class TrainerLease:
    """The exclusive right to train a run. Every verb raises `FencedError` once another trainer has taken over."""

    def __init__(self, connection: RunConnection, token: int, lease_s: float) -> None:
        self.connection = connection
        self.token = token
        """The fencing token."""
        self._lease_s = lease_s
        self._published: tuple[int, str, int, bytes] | None = None
        """Version, path, step and metrics of the last publication."""
        self._has_recovered = False
        self.lost_recovery = False
        """The server lost the write of `recover`, which must be called again before more groups are ended."""

    @classmethod
    async def acquire(cls, connection: RunConnection, lease_s: float, min_token: int = 0) -> "TrainerLease":
        """Become the run's trainer; waits for the lease of a previous trainer that does not renew it to expire.

        Args:
            connection: to the run.
            lease_s: how long the lease lasts without being renewed.
            min_token: the highest token that the run's folder has seen; the new token is larger.

        Raises:
            FencedError: another trainer is alive.
        """
        here = await anyio.to_thread.run_sync(_process_namespace)
        me = f"{here}/{os.getpid()}/{secrets.token_hex(4)}"
        deadline, known_dead, logged = anyio.current_time() + 1.5 * lease_s + 1, "", False
        while True:
            answer = await connection.run_script("acquire_trainer", me, int(lease_s * 1000), known_dead, min_token)
            if answer[0]:
                return cls(connection, answer[0], lease_s)
            holder = answer[1].decode()
            if holder != known_dead and _has_exited(holder, here):
                known_dead = holder
                continue
            if anyio.current_time() > deadline:
                raise FencedError(
                    f"{owner_name(holder)} trains run {connection.run!r} already; "
                    "stop it first, or give this run another name"
                )
            if not logged:
                log.info("trainer.waiting", holder=owner_name(holder), lease_ms=answer[2])
                logged = True
            await anyio.sleep(min(1.0, answer[2] / 1000 + 0.01))

    @classmethod
    async def acquire_if_free(
        cls, connection: RunConnection, lease_s: float, min_token: int, owner: str
    ) -> "TrainerLease | None":
        """Become the run's trainer if it has none; never waits.

        Args:
            connection: to the run.
            lease_s: how long the lease lasts without being renewed.
            min_token: see `acquire`.
            owner: name of the caller, for messages.

        Returns:
            None if a trainer has the run, or had it within its lease time.
        """
        answer = await connection.run_script("acquire_trainer", owner, int(lease_s * 1000), "", min_token)
        return cls(connection, answer[0], lease_s) if answer[0] else None

    async def renew_forever(self) -> None:
        """Renew the lease until cancelled; run it in the trainer's task group."""
        while True:
            await anyio.sleep(self._lease_s / 3)
            await self.renew()

    async def renew(self) -> None:
        """Renew the lease once. Call it before a change that no script checks, such as a push of weights.

        If the server lost the last publication, it is published again: otherwise the capacity that it freed would stay
        taken, and no worker could claim until the next version.
        """
        published = self._published
        held, *answer = await self.connection.run_script("renew_trainer", self.token, int(self._lease_s * 1000))
        self._raise_if_fenced(held)
        stop, version, recovered = answer
        self.lost_recovery = self._has_recovered and not recovered
        self.connection.observe_stop(stop)
        if published is not None and version < published[0]:
            log.warning("policy.state_lost", version=published[0], server_has=version)
            self._raise_if_fenced(await self.connection.run_script("publish_version", self.token, *published))

    async def release(self) -> None:
        """Give up the lease, so that the next trainer need not wait."""
        await self.connection.run_script("renew_trainer", self.token, 0)

    async def recover(
        self, ledger: Ledger, *, keep_cut: bool = False, has_checkpoint: bool = False, is_restored: bool = False
    ) -> int:
        """Make the server agree with the ledger.

        Marked groups that the ledger has are acknowledged, all others that a previous trainer held are delivered again,
        and the counts are derived from the ledger. Call it before the first claim, and again if `lost_recovery` is set.
        If the server has deleted groups that the checkpoint lacks, because an older checkpoint than the newest is used,
        all prompts that the ledger lacks are fed again.

        Args:
            ledger: if it is not cut to the checkpoint yet, it is cut here, after it was compared with the server.
            keep_cut: keep what is cut off in a file, since the checkpoint is not the newest one.
            has_checkpoint: the weights come from a checkpoint, even if its part of the ledger is empty.
            is_restored: ledger and weights come from a copy, which may be older than what the server has.

        Returns:
            The number of marked groups that are delivered again.

        Raises:
            RunMismatchError: the server has ended prompts of which the ledger's file knows nothing. Nothing is changed.
        """
        facts = await self._read_recovery(ledger, has_checkpoint, is_restored)
        starts = not self._has_recovered
        if facts.must_rebuild:
            log.warning("server.rebuilt", why="the checkpoint is older than what the server has deleted", **facts.log())
            self._raise_if_fenced(await self.connection.run_script("rebuild", self.token, ledger.length))
        if not ledger.is_cut:
            await anyio.to_thread.run_sync(lambda: ledger.cut(keep_cut=keep_cut or facts.must_rebuild))
        facts = await self._read_recovery(ledger, has_checkpoint, is_restored)
        await self._undo_dead_letters(ledger)
        if starts:  # later the ledger has records that no checkpoint contains
            recorded = [entry for entry, prompt in facts.marked.items() if prompt in ledger.outcomes]
            await self.acknowledge(recorded, ledger.checkpointed_bytes)
        counts_json = msgspec.json.encode(ledger.count_outcomes())
        ended = [item for prompt in facts.ended for item in (prompt, encode_outcome(ledger.outcomes[prompt]))]
        again = [item for pair in facts.again.items() for item in pair]
        await upload_ends(self.connection, ledger)
        self._raise_if_fenced(
            await self.connection.run_script(
                *("recover", self.token, ledger.resumed_bytes, counts_json, len(facts.ended)), *ended, *again
            )
        )
        self._has_recovered, self.lost_recovery = True, False
        return len(facts.again)

    async def _read_recovery(self, ledger: Ledger, has_checkpoint: bool, is_restored: bool) -> RecoveryFacts:
        """Compare the server with the ledger, by sets of prompts.

        Raises:
            RunMismatchError: see `recover`.
        """
        known = await anyio.to_thread.run_sync(lambda: ledger.known_prompts)
        answer = await self.connection.run_script("read_recovery")
        facts = await anyio.to_thread.run_sync(RecoveryFacts.compare, answer, ledger)
        run, path = self.connection.run, ledger.path
        file_bytes = await anyio.to_thread.run_sync(lambda: ledger.file_bytes)
        # The ledger fitted the server until one of the two was set back, or damaged.
        if self._has_recovered or is_restored or ledger.is_rebuilt:
            return facts
        suspicious = facts.acknowledged > file_bytes or facts.unexplained > len(known) - len(ledger.outcomes)
        if suspicious and not ledger.archived_prompts:
            ledger.archived_prompts = await anyio.to_thread.run_sync(archived_prompts, path.parent)
            known |= ledger.archived_prompts
            if facts.unexplained <= len(known) - len(ledger.outcomes):
                file_bytes = max(file_bytes, facts.acknowledged)
        if facts.acknowledged > file_bytes:
            raise RunMismatchError(
                f"the server of run {run!r} has deleted groups up to byte {facts.acknowledged} of the ledger, but "
                f"{path} has {file_bytes} bytes: it is another run's ledger, or an older one. Restore the run's "
                "folder, or give this run another name"
            )
        if facts.unexplained > 0 and facts.unexplained + len(ledger.outcomes) > len(known):
            raise RunMismatchError(
                f"{facts.unexplained} prompts of run {run!r} have ended that are not in {path}: it is another run's "
                "ledger, or an older one. Restore the run's folder, or give this run another name"
            )
        if (facts.acknowledged > 0 or facts.is_abandoned) and not (facts.ledger_bytes or has_checkpoint):
            raise RunMismatchError(
                f"the server of run {run!r} has deleted groups that a checkpoint contained, but {path.parent} has no "
                "checkpoint. Restore the run's folder, or give this run another name"
            )
        return facts

    async def _undo_dead_letters(self, ledger: Ledger) -> None:
        """Let dead letters of prompts that were trained or dropped end nothing: a server that lost writes made them."""
        letters = [letter for letter in await scan_dead_entries(self.connection) if letter.ends_prompt]
        duplicates = [letter for letter in letters if letter.prompt in ledger.outcomes]
        for i in range(0, len(duplicates), _CHUNK):
            flat = [
                item
                for letter in duplicates[i : i + _CHUNK]
                for item in (letter.prompt, encode_outcome(ledger.outcomes[letter.prompt]))
            ]
            self._raise_if_fenced(await self.connection.run_script("mark_duplicates", self.token, *flat))

    async def reconcile_server(self, ledger: Ledger, ledger_bytes: int | None = None) -> None:
        """Correct a server that lost its last writes, for prompts that have an outcome in the ledger.

        A duplicate of such a prompt may have become a dead letter, which does not end the prompt; a mark that was
        acknowledged may be there again. Call it with a ledger that a durable checkpoint contains, before the run is
        finished. `recover` does it, too.
        """
        await self._undo_dead_letters(ledger)
        marked = await self.connection.read_hash("scored:marked")
        await self.acknowledge([entry for entry, prompt in marked.items() if prompt in ledger.outcomes], ledger_bytes)

    async def commit(self, stage: Stage, ended: Sequence[EndedGroup], release_version: int) -> list[str]:
        """Mark groups with their outcome.

        Args:
            stage: where they were leased.
            ended: the groups.
            release_version: the version whose publication frees the capacity of groups that were trained or in a step.

        Returns:
            Entry ids whose lease was lost before they could be marked; they are delivered again.
        """
        flat = [
            item
            for each in ended
            for item in (
                each.lease.id,
                each.lease.prompt_id,
                "step:" * each.in_step + encode_outcome(each.outcome),
            )
        ]
        with stage.ending([each.lease for each in ended]):
            answer = await self.connection.run_script("commit", stage.consumer, self.token, release_version, *flat)
        self._raise_if_fenced(answer[0])
        return [entry.decode() for entry in answer[1]]

    async def acknowledge(self, entry_ids: Sequence[str], ledger_bytes: int | None = None) -> None:
        """Delete marked entries. Call it after a checkpoint that contains their effect is durable.

        Args:
            entry_ids: ids of the entries.
            ledger_bytes: length of the ledger in that checkpoint; None: not known to the caller.
        """
        length = "" if ledger_bytes is None else ledger_bytes
        for i in range(0, len(entry_ids), _CHUNK):
            chunk = entry_ids[i : i + _CHUNK]
            self._raise_if_fenced(1 + await self.connection.run_script("acknowledge", self.token, length, *chunk))

    async def read_unrecorded_outcomes(self, after: str = "") -> list[tuple[str, str, LedgerEntry]]:
        """Return ends that were decided without the trainer and are not in the ledger: entry id, prompt, end.

        Args:
            after: return entries after this one; empty: from the first.
        """
        first = f"({after}" if after else "-"
        found: Any = await self.connection.with_retry(
            lambda: self.connection.redis.xrange(self.connection.key("unrecorded_outcomes"), first)
        )
        return [
            (entry.decode(), fields[b"prompt"].decode(errors="replace"), decode_outcome(fields[b"outcome"].decode()))
            for entry, fields in found
        ]

    async def read_dead_prompts(self) -> dict[str, Dead]:
        """Return the prompts that are dead letters now."""
        letters = await scan_dead_entries(self.connection)
        return {letter.prompt: Dead(letter.reason) for letter in letters if letter.ends_prompt}

    async def forget_unrecorded_outcomes(self, entry_ids: Sequence[str]) -> None:
        """Delete entries of `read_unrecorded_outcomes`. Call it after the ledger that has them is durable."""
        if entry_ids:
            await self.connection.with_retry(
                lambda: self.connection.redis.xdel(self.connection.key("unrecorded_outcomes"), *entry_ids)
            )

    async def reserve_version(self, known: int) -> int:
        """Return a policy version number that was never used, above `known` (of the checkpoint, or of an engine)."""
        number: int = await self.connection.run_script("reserve_version", self.token, known)
        self._raise_if_fenced(number + 1)
        return number

    async def publish(self, version: int, path: Path, step: int, metrics: dict[str, Any]) -> None:
        """Announce a version that the engines have."""
        publication = (version, str(path), step, msgspec.json.encode(metrics))
        self._raise_if_fenced(await self.connection.run_script("publish_version", self.token, *publication))
        self._published = publication

    async def begin_evaluation(self, version: int, step: int, settings_digest: str) -> str:
        """Begin an evaluation of a published version (`stream.queue.evaluation`); the previous one is deleted.

        Args:
            version: the version; the engines have it.
            step: the trainer's step.
            settings_digest: of the settings that must have made the evaluation prompts.

        Returns:
            An empty string if the evaluation has begun. Otherwise the feeder has not uploaded those prompts yet, and
            the return value is the `wake` entry to wait after.
        """
        status, *rest = await self.connection.run_script("begin_evaluation", self.token, version, step, settings_digest)
        self._raise_if_fenced(1 + status)
        return "" if status == 1 else str(rest[0].decode())

    async def end_evaluation(self, latest: bytes) -> None:
        """End the current evaluation, complete or not; `latest` is the last result that exists, in JSON."""
        self._raise_if_fenced(await self.connection.run_script("end_evaluation", self.token, latest))

    async def finish_run(self, reason: str) -> None:
        """End the run: all its workers exit."""
        self._raise_if_fenced(await self.connection.run_script("finish_run", self.token, reason))

    def _raise_if_fenced(self, answer: int) -> None:
        if not answer:
            raise FencedError(f"another trainer has taken over run {self.connection.run!r}; this one must stop")


def owner_name(owner: str) -> str:
    """Return a lease's owner as people read it: `process 343 on gpu-3`. A name of another form stays as it is."""
    place, pid = _place_and_pid(owner)
    return f"process {pid} on {place.partition(':pid:')[0]}" if pid.isdigit() else owner


def _place_and_pid(owner: str) -> tuple[str, str]:
    place, pid, _ = (*owner.rsplit("/", 2), "", "")[:3]
    return place, pid


def _process_namespace() -> str:
    """Return what makes a process id unique: the host and, on Linux, the namespace of process ids (containers)."""
    try:
        return f"{socket.gethostname()}:{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _has_exited(holder: str, namespace: str) -> bool:
    """Return whether the holder was a process of our namespace that no longer exists."""
    place, pid = _place_and_pid(holder)
    if place != namespace or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
