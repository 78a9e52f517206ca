"""The trainer's side of the pipe: one trainer to a run, marks at the step, acknowledgement at a durable checkpoint.

Public: another trainer may lease scored groups with `Stage(link, "scored", ...)`, and end them with the same verbs::

    tenure = await TrainerLease.acquire(link, owner, lease_s)       # fencing: refuses a second trainer
    await tenure.recover(ledger)                            # what the checkpoint lacks comes again
    ...
    await tenure.commit(stage, ends, frees_at=version + 1)  # marked: no longer outstanding, not yet acknowledged
    version = await tenure.reserve(known)                   # a number never used before
    await tenure.publish(version, path, step, metrics)      # after the engines have it
    await tenure.acknowledge(entry_ids)                     # after the checkpoint is durable
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
from stream.operator.run_scan import scan_dead_entries
from stream.queue.stage import Lease, Stage
from stream.trainer.ledger import Ledger
from stream.trainer.outcomes import GroupOutcome, encode_outcome

log = structlog.get_logger()

_CHUNK = 500


class EndedGroup(Struct, frozen=True):
    """A leased group and its outcome."""

    lease: Lease
    outcome: GroupOutcome
    in_step: bool = False
    """The group was part of a step, so its capacity is freed by the next version even if the step dropped it. Freed at
    once, more groups would start under this version than can be trained in time."""


class PublishedPolicy(Struct, frozen=True):
    """A published policy version; -1 before the first."""

    version: int = -1
    path: str = ""
    step: int = 0


async def read_published_policy(connection: RunConnection) -> PublishedPolicy:
    """The policy version that the engines have."""
    found = await connection.read_hash("policy")
    if "version" not in found:
        return PublishedPolicy()
    return PublishedPolicy(int(found["version"]), found["path"], int(found["step"]))


class TrainerLease:
    """The right to train this run. Every verb fails with `FencedError` once another trainer has taken over."""

    def __init__(self, connection: RunConnection, token: int, lease_s: float) -> None:
        self.connection = connection
        self.token = token
        self._lease_s = lease_s
        self._published: tuple[int, str, int, bytes] | None = None
        """The last version, path, step and metrics that the server was told of."""

    @classmethod
    async def acquire(cls, connection: RunConnection, lease_s: float, min_token: int = 0) -> "TrainerLease":
        """Become the trainer; a holder that does not renew within its lease is succeeded.

        The token is larger than any that the server knows, and than `above` (what the run's folder knows of).

        Raises:
            FencedError: a living trainer holds the run.
        """
        here = await anyio.to_thread.run_sync(_process_namespace)
        me = f"{here}/{os.getpid()}/{secrets.token_hex(4)}"
        deadline, known_dead, told = anyio.current_time() + 1.5 * lease_s + 1, "", False
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
                    f"{holder} trains run {connection.run!r} already; stop it first, or give this run another name"
                )
            if not told:
                log.info("trainer.waiting", holder=holder, lease_ms=answer[2])
                told = True
            await anyio.sleep(min(1.0, answer[2] / 1000 + 0.01))

    async def renew_forever(self) -> None:
        """Renew the right, for ever; run it in the trainer's task group.

        A server that lost its last writes is told again which policy version there is: it may have forgotten that
        groups gave their places back, and nobody could claim until the next one.
        """
        while True:
            await anyio.sleep(self._lease_s / 3)
            await self.renew()

    async def renew(self) -> None:
        """Renew the right once; also a way to ask whether one still has it, before a step that no script guards."""
        published = self._published
        held, *told = await self.connection.run_script("renew_trainer", self.token, int(self._lease_s * 1000))
        self._raise_if_fenced(held)
        stop, version = told
        self.connection.observe_stop(stop)
        if published is not None and version < published[0]:
            log.warning("policy.state_lost", version=published[0], server_has=version)
            self._raise_if_fenced(await self.connection.run_script("publish_version", self.token, *published))

    async def release(self) -> None:
        """Give the right up, so that a successor need not wait."""
        await self.connection.run_script("renew_trainer", self.token, 0)

    async def recover(self, ledger: Ledger) -> int:
        """Meet what an earlier trainer left behind: acknowledge what the ledger holds, let the rest come again.

        Call it before the first claim, with the ledger as the checkpoint left it.

        Returns:
            Groups that come again.

        Raises:
            RunMismatchError: prompts have ended on the server that neither the ledger nor a mark remembers.
        """
        marked = await self.connection.read_hash("scored:marked")
        again = {entry: prompt for entry, prompt in marked.items() if prompt not in ledger.outcomes}
        counts = await self.connection.read_hash("counts")
        ended = sum(int(n) for name, n in counts.items() if name == "trained" or name.startswith("dropped:"))
        forgotten = ended - int(counts.get("dropped:operator", 0)) - len(again) - len(ledger.outcomes)
        if forgotten > 0:
            raise RunMismatchError(
                f"{forgotten} prompts of run {self.connection.run!r} have ended of which {ledger.path} knows nothing: it is "
                "another run's ledger, or an older one. Put the run's own folder back, or give this run another name"
            )
        await self.reconcile_server(ledger)
        open_prompts: Any = await self.connection.with_retry(
            lambda: self.connection.redis.hkeys(self.connection.key("unfinished"))
        )
        closed = [prompt for prompt in open_prompts if prompt.decode(errors="replace") in ledger.outcomes]
        self._raise_if_fenced(
            await self.connection.run_script(
                *(
                    "recover",
                    self.token,
                    ledger.checkpointed_bytes,
                    msgspec.json.encode(ledger.count_outcomes()),
                    len(closed),
                    *closed,
                ),
                *(item for pair in again.items() for item in pair),
            )
        )
        return len(again)

    async def reconcile_server(self, ledger: Ledger) -> None:
        """Meet what a server brought back that lost its last writes: prompts that have ended by the ledger.

        A second copy may have died on the way: a dead letter of it is no end of the prompt. A mark that was
        acknowledged already stands again. Call it with a ledger that a durable checkpoint holds, before the run is
        finished; `recover` does it, too.
        """
        copies = [
            letter
            for letter in await scan_dead_entries(self.connection)
            if letter.ends_prompt and letter.prompt in ledger.outcomes
        ]
        for i in range(0, len(copies), _CHUNK):
            flat = [
                item
                for copy in copies[i : i + _CHUNK]
                for item in (copy.id, encode_outcome(ledger.outcomes[copy.prompt]))
            ]
            self._raise_if_fenced(await self.connection.run_script("mark_duplicates", self.token, *flat))
        marked = await self.connection.read_hash("scored:marked")
        await self.acknowledge([entry for entry, prompt in marked.items() if prompt in ledger.outcomes])

    async def commit(self, stage: Stage, ended: Sequence[EndedGroup], release_version: int) -> list[str]:
        """Mark groups as ended; those trained, or in a step, give their place back when `frees_at` is published.

        Returns:
            Entry ids whose lease was lost before they could be marked; somebody will bring them again.
        """
        for end in ended:
            end.lease.ending = True
        flat = [
            x
            for end in ended
            for x in (end.lease.id, end.lease.prompt_id, "step:" * end.in_step + encode_outcome(end.outcome))
        ]
        answer = await self.connection.run_script("commit", stage.consumer, self.token, release_version, *flat)
        self._raise_if_fenced(answer[0])
        for end in ended:
            stage.leases.pop(end.lease.id, None)
        return [entry.decode() for entry in answer[1]]

    async def acknowledge(self, entry_ids: Sequence[str]) -> None:
        """Delete marked entries: a checkpoint that contains their effect is durable."""
        for i in range(0, len(entry_ids), _CHUNK):
            self._raise_if_fenced(
                1 + await self.connection.run_script("acknowledge", self.token, *entry_ids[i : i + _CHUNK])
            )

    async def reserve_version(self, known: int) -> int:
        """A policy version number that nobody has used, above `known` (the highest the checkpoint or an engine has)."""
        number: int = await self.connection.run_script("reserve_version", self.token, known)
        self._raise_if_fenced(number + 1)
        return number

    async def publish(self, version: int, path: Path, step: int, metrics: dict[str, Any]) -> None:
        """Say that the engines have a version."""
        said = (version, str(path), step, msgspec.json.encode(metrics))
        self._raise_if_fenced(await self.connection.run_script("publish_version", self.token, *said))
        self._published = said

    async def begin_evaluation(self, version: int, step: int, settings_digest: str) -> str:
        """Begin an evaluation of a published version (`stream.queue.evaluation`); what an earlier one left goes.

        Args:
            version: that the engines have.
            step: of the trainer.
            settings_digest: which settings the held-out prompts must have been made by.

        Returns:
            Empty where it has begun; else the `wake` entry to wait after: the feeder has yet to bring those prompts.
        """
        status, *rest = await self.connection.run_script("begin_evaluation", self.token, version, step, settings_digest)
        self._raise_if_fenced(1 + status)
        return "" if status == 1 else str(rest[0].decode())

    async def end_evaluation(self, latest: bytes) -> None:
        """The evaluation under way is over, or given up; `latest`: the last result that there is, in JSON."""
        self._raise_if_fenced(await self.connection.run_script("end_evaluation", self.token, latest))

    async def finish_run(self, reason: str) -> None:
        """End the run: whoever waits for work goes home."""
        self._raise_if_fenced(await self.connection.run_script("finish_run", self.token, reason))

    def _raise_if_fenced(self, answer: int) -> None:
        if not answer:
            raise FencedError(f"another trainer has taken over run {self.connection.run!r}; this one must stop")


def _process_namespace() -> str:
    """Where a process id means what it means to us: this host and, in containers, this namespace of process ids."""
    try:
        return f"{socket.gethostname()}:{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _has_exited(holder: str, namespace: str) -> bool:
    """Whether the holder was a process beside us that no longer exists."""
    place, pid, _ = (*holder.rsplit("/", 2), "", "")[:3]
    if place != namespace or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
