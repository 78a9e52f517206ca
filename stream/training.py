"""The trainer's side of the pipe: one trainer to a run, marks at the step, acknowledgement at a durable checkpoint.

Public: another trainer may lease scored groups with `Stage(link, "scored", ...)`, and end them with the same verbs::

    tenure = await Tenure.begin(link, owner, lease_s)       # fencing: refuses a second trainer
    await tenure.recover(ledger)                            # what the checkpoint lacks comes again
    ...
    await tenure.commit(stage, ends, frees_at=version + 1)  # marked: no longer outstanding, not yet acknowledged
    version = await tenure.reserve(known)                   # a number never used before
    await tenure.publish(version, path, step, metrics)      # after the engines have it
    await tenure.acknowledge(entry_ids)                     # after the checkpoint is durable
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
from msgspec import Struct

from stream.errors import FencedError
from stream.ledger import Ledger
from stream.link import Link
from stream.stage import Lease, Stage

log = structlog.get_logger()

_CHUNK = 500


class End(Struct, frozen=True):
    """How a group ended: `trained`, `dropped:REASON`, or `again:END` where the ledger holds that END of it already."""

    lease: Lease
    ending: str


class Policy(Struct, frozen=True):
    """A published policy version; -1 before the first."""

    version: int = -1
    path: str = ""
    step: int = 0


async def current_policy(link: Link) -> Policy:
    """The policy version that the engines have."""
    found = await link.read_hash("policy")
    if "version" not in found:
        return Policy()
    return Policy(int(found["version"]), found["path"], int(found["step"]))


class Tenure:
    """The right to train this run. Every verb fails with `FencedError` once another trainer has taken over."""

    def __init__(self, link: Link, token: int, lease_s: float) -> None:
        self.link = link
        self.token = token
        self._lease_s = lease_s

    @classmethod
    async def begin(cls, link: Link, lease_s: float) -> "Tenure":
        """Become the trainer; a holder that does not renew within its lease is succeeded.

        Raises:
            FencedError: a living trainer holds the run.
        """
        me = f"{socket.gethostname()}/{os.getpid()}"
        with anyio.move_on_after(1.5 * lease_s + 1):
            known_dead = ""
            while True:
                answer = await link.script("enlist", me, int(lease_s * 1000), known_dead)
                if answer[0]:
                    return cls(link, answer[0], lease_s)
                holder = answer[1].decode()
                if not known_dead and _is_dead(holder):
                    known_dead = holder
                    continue
                log.info("trainer.awaited", holder=holder, lease_ms=answer[2])
                await anyio.sleep(min(1.0, answer[2] / 1000 + 0.01))
        raise FencedError(f"{holder} trains run {link.run!r} already; stop it first, or give this run another name")

    async def keep(self) -> None:
        """Renew the right, for ever; run it in the trainer's task group."""
        while True:
            await anyio.sleep(self._lease_s / 3)
            self._check(await self.link.script("stay", self.token, int(self._lease_s * 1000)))

    async def end(self) -> None:
        """Give the right up, so that a successor need not wait."""
        await self.link.script("stay", self.token, 0)

    async def recover(self, ledger: Ledger) -> int:
        """Meet what an earlier trainer left behind: acknowledge what the ledger holds, let the rest come again.

        Returns:
            Groups that come again.
        """
        flat = [item.decode() for item in await self.link.script("marked")]
        marked = list(zip(flat[::2], flat[1::2], strict=True))
        await self.acknowledge([entry for entry, prompt in marked if prompt in ledger.ends])
        again = [(entry, prompt) for entry, prompt in marked if prompt not in ledger.ends]
        counts = msgspec.json.encode(ledger.tally())
        chunks = [again[i : i + _CHUNK] for i in range(0, len(again), _CHUNK)] or [[]]
        for chunk in chunks:
            self._check(await self.link.script("recover", self.token, counts, *(x for pair in chunk for x in pair)))
        return len(again)

    async def commit(self, stage: Stage, ends: Sequence[End], frees_at: int) -> list[str]:
        """Mark groups as ended; those trained give their place back when version `frees_at` is published.

        Returns:
            Entry ids whose lease was lost before they could be marked; somebody will bring them again.
        """
        flat = [x for end in ends for x in (end.lease.id, end.lease.prompt_id, end.ending)]
        answer = await self.link.script("commit", stage.consumer, self.token, frees_at, *flat)
        self._check(answer[0])
        for end in ends:
            stage.held.pop(end.lease.id, None)
        return [entry.decode() for entry in answer[1]]

    async def acknowledge(self, entry_ids: Sequence[str]) -> None:
        """Delete marked entries: a checkpoint that contains their effect is durable."""
        for i in range(0, len(entry_ids), _CHUNK):
            self._check(1 + await self.link.script("acknowledge", self.token, *entry_ids[i : i + _CHUNK]))

    async def reserve(self, known: int) -> int:
        """A policy version number that nobody has used, above `known` (the highest the checkpoint or an engine has)."""
        number: int = await self.link.script("reserve", self.token, known)
        self._check(number + 1)
        return number

    async def publish(self, version: int, path: Path, step: int, metrics: dict[str, Any]) -> None:
        """Say that the engines have a version."""
        self._check(
            await self.link.script("publish", self.token, version, str(path), step, msgspec.json.encode(metrics))
        )

    async def finish(self, why: str) -> None:
        """End the run: whoever waits for work goes home."""
        self._check(await self.link.script("finish", self.token, why))

    def _check(self, answer: int) -> None:
        if not answer:
            raise FencedError(f"another trainer has taken over run {self.link.run!r}; this one must stop")


def _is_dead(holder: str) -> bool:
    """Whether the holder was a process of this host that no longer exists."""
    host, _, pid = holder.rpartition("/")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
