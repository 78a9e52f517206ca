"""Records of sandboxes: each belongs to the lease on one entry, from before it is created until it was removed.

A worker that is killed leaves the records of its sandboxes behind, and the reaper of any other worker removes what they
name. So nothing leaks that was not created without a record, and `penstock audit` can add up: begun = ended + live.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.connection.run_identity import read_server_identity
from stream.errors import LeaseLostError
from stream.queue.lease import Lease
from stream.queue.stage import Stage

SandboxEnd = Literal["stopped", "reaped", "stray"]
"""How a sandbox ended: removed by its owner, by a reaper because its owner had lost it, or by a reaper that found it
without a record."""


class SandboxRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server knows about a sandbox. Times are Unix times in ms, by the server's clock."""

    stage: str
    """Stage of the entry whose lease owns it."""
    entry: str
    prompt: str
    index: int
    """Position of the completion in its group."""
    purpose: str
    """`agent`, `verifier`, `control`, or what else its environment says."""
    spec: str = ""
    """What it was made of, as its maker encodes it."""
    owner: str = ""
    """The worker that created or adopted it last."""
    fence: int = 1
    """Grows with each adoption."""
    begun_ms: int = 0
    """When it was noted; its creation began afterwards."""
    until_ms: int = 0
    """When it ends by itself."""
    lost_ms: int | None = None
    """Since when no lease owns it; None: one does, or nobody has looked yet."""
    is_due: bool = False
    """It is to be removed, and cannot be adopted."""
    tries: int = 0
    """How often a reaper has tried to remove it."""


class DueSandboxes(Struct, frozen=True, kw_only=True):
    """What a reaper has to do in one place."""

    is_active: bool
    """Whether the caller looks after this place; otherwise another worker does, and nothing is due for the caller."""

    wake_id: str
    """Id of the last entry of the stream `wake`."""
    total: int
    """Records of the place, due or not."""
    now_ms: int
    due: dict[str, SandboxRecord]
    """By the sandbox's name."""


class SandboxCounts(Struct, frozen=True, kw_only=True):
    """Sandboxes of a run so far: `begun = stopped + reaped + stray + live`."""

    begun: int = 0
    stopped: int = 0
    reaped: int = 0
    stray: int = 0
    adopted: int = 0
    """How often a worker went on with the sandbox of another."""

    @classmethod
    def parse(cls, counts: Mapping[str, int | str]) -> "SandboxCounts":
        """Return the counts that the server has by these names."""
        return cls(
            begun=int(counts.get("begun", 0)),
            adopted=int(counts.get("adopted", 0)),
            **{how: int(counts.get(f"ended:{how}", 0)) for how in ("stopped", "reaped", "stray")},
        )

    @property
    def ended(self) -> int:
        """Those that were removed."""
        return self.stopped + self.reaped + self.stray


class SandboxPlace:
    """The records of the sandboxes in one place.

    Args:
        connection: to the run.
        place: where they live; for example an engine's id.
        provider: name of what makes them there.
    """

    def __init__(self, connection: RunConnection, place: str, provider: str) -> None:
        self.connection = connection
        self.place = place
        self.provider = provider

    async def begin(self, stage: Stage, lease: Lease, name: str, record: SandboxRecord, max_life_s: float) -> float:
        """Note a sandbox before it is created. Returns the Unix time in seconds, by the server's clock.

        Args:
            stage: of the lease.
            lease: which owns it from now on.
            name: of the sandbox; used for no other.
            record: entry, purpose and spec; the server fills in the rest.
            max_life_s: seconds after which it ends by itself.

        Raises:
            LeaseLostError: the lease is not held any more; nothing may be created.
        """
        begun_ms = await self.connection.run_script(
            *("sandbox_begin", self.place, self.provider, stage.name, stage.consumer, lease.id, name),
            *(msgspec.json.encode(record), int(1000 * max_life_s)),
        )
        if not begun_ms:
            lease.mark_lost()
            raise LeaseLostError(f"the lease on {lease.prompt_id or lease.id} in {stage.name} expired")
        return float(begun_ms) / 1000

    async def adopt(self, stage: Stage, lease: Lease, name: str) -> int:
        """Make a lease the owner of a sandbox that an earlier attempt at its entry has left.

        Returns:
            The new fence, larger than all before; 0: it is gone, or about to be removed, or the lease is lost.
        """
        fence: int = await self.connection.run_script(
            "sandbox_adopt", self.place, name, stage.name, stage.consumer, lease.id
        )
        return fence

    async def end(self, name: str, how: SandboxEnd) -> bool:
        """Delete the record of a sandbox that is gone, and count it. Returns False if that was done before."""
        return bool(await self.connection.run_script("sandbox_end", self.place, name, how))

    async def leave_to_reaper(self, name: str) -> None:
        """Let the reaper remove a sandbox of which it is not known whether it is gone."""
        await self.connection.run_script("sandbox_end", self.place, name, "due")

    async def find_due(self, worker: str, grace_s: float, lease_s: float, active_s: float) -> DueSandboxes:
        """Return the sandboxes to remove now, if no other worker looks after this place.

        Args:
            worker: name of the caller, which looks after the place for the next `active_s` seconds.
            grace_s: time for which another worker may adopt what its owner has lost.
            lease_s: lease time of the run's workers.
            active_s: time for which no other worker looks.
        """
        answer = await self.connection.run_script(
            *("sandboxes_due", self.place, worker, int(1000 * active_s), int(1000 * grace_s), int(1000 * lease_s)),
            MAX_DUE,
        )
        is_active, wake_id, total, now_ms, *due = answer
        return DueSandboxes(
            is_active=bool(is_active),
            wake_id=wake_id.decode(),
            total=total,
            now_ms=now_ms,
            due={name.decode(): msgspec.json.decode(record, type=SandboxRecord) for name, record in due},
        )

    async def records(self) -> dict[str, SandboxRecord]:
        """Return all records of the place, by the sandbox's name."""
        return await read_sandboxes(self.connection, self.place)


MAX_DUE = 64
"""Sandboxes that a reaper gets at a time."""


async def read_sandbox_places(connection: RunConnection) -> dict[str, str]:
    """Return the places in which the run has had sandboxes, each with the name of its provider."""
    return await connection.read_hash("sandbox_places")


async def read_sandboxes(connection: RunConnection, place: str) -> dict[str, SandboxRecord]:
    """Return the sandboxes in a place that are not known to be gone, by name."""
    records: Any = await connection.read_hash(f"sandboxes:{place}")
    return {name: msgspec.json.decode(record, type=SandboxRecord) for name, record in records.items()}


async def read_sandbox_counts(connection: RunConnection) -> SandboxCounts:
    """Return how many sandboxes have begun and ended."""
    return SandboxCounts.parse(await connection.read_hash("sandbox_counts"))


async def sandbox_run_id(connection: RunConnection) -> str:
    """Return the id of the run in the labels of its sandboxes."""
    return (await read_server_identity(connection)).id or connection.run
