"""One stage of the pipe, seen by one worker: claim, renew, settle, release, bury.

Async is a thin shell: each verb is one script (`lua/`), which is where the guarantees live. A lease is renewed in the
background for as long as `Stage.keep` runs, so a worker that is alive never loses one because an episode is long.
"""

import random
from typing import Literal

import anyio
import structlog
from msgspec import Struct

from stream.codec import encode
from stream.errors import LeaseLostError, PenstockError
from stream.keys import RESERVED, StageName
from stream.link import LONGEST_WAIT_S, Link
from stream.records import Group

log = structlog.get_logger()

Kind = Literal["infra", "data", "none"]
"""Whose fault a release is: the world's, the record's own, or nobody's (a drain, an engine that is away)."""


class Terms(Struct, frozen=True, kw_only=True):
    """How long a lease lasts, and how often an entry may fail."""

    lease_s: float = 15.0
    infra_attempts: int = 5
    data_attempts: int = 2
    backoff_s: float = 0.5

    def backoff(self, failures: int) -> float:
        """Seconds before the next try: doubles, up to 60 times the first, less up to half of it as jitter."""
        return random.uniform(0.5, 1.0) * self.backoff_s * min(2.0 ** min(failures, 6), 60.0)


class Lease(Struct, kw_only=True, eq=False):
    """An entry that belongs to this worker, for as long as it renews it."""

    id: str
    """The entry's id in its stream."""
    prompt_id: str
    """The plain field beside the payload; empty for foreign junk."""
    payload: bytes
    infra_failures: int = 0
    data_failures: int = 0
    scope: anyio.CancelScope | None = None
    """Set by whoever works on it: cancelled the moment the lease is known to be lost."""
    lost: bool = False
    ending: bool = False
    """The verb that ends it is under way, and will itself say whether it still held."""


class Claim(Struct, kw_only=True):
    """What a claim returned: entries, or what to wait for."""

    leases: list[Lease]
    wake: str
    due_s: float | None
    finished: str
    """Why the run has ended; empty while it goes on."""
    open_prompts: int
    """Prompts without an end, wherever they are."""
    feed_done: bool
    version: int
    """The published policy version; -1 before the first."""
    paused: bool = False
    """No prompts are handed out, whatever there is."""


class Stage:
    """A stage and this worker's leases in it.

    Args:
        link: the run's connection.
        name: which stage.
        consumer: this worker's name; never reused by another process.
        terms: lease time and budgets.
        capacity: for `prompts`: groups that may be outstanding; None: no bound.
    """

    def __init__(self, link: Link, name: StageName, consumer: str, terms: Terms, capacity: int | None = None) -> None:
        if consumer in RESERVED:
            raise PenstockError(f"a worker cannot be called {consumer!r}: that name stands for entries nobody works on")
        self.link = link
        self.name = name
        self.consumer = consumer
        self.terms = terms
        self.held: dict[str, Lease] = {}
        self._capacity = -1 if capacity is None else capacity

    async def claim(self, count: int) -> Claim:
        """Claim up to `count` entries; never blocks.

        Of prompts none while the run is paused, of anything none once the run was asked to stop (`Link.stopping`).
        """
        lease_ms = int(self.terms.lease_s * 1000)
        answer = await self.link.script(
            *("claim", self.name, self.consumer, count, lease_ms, self.terms.infra_attempts, self._capacity),
            self.link.stop_before,
        )
        wake, due_ms, finished, open_prompts, done, version, taken, stop, paused = answer
        self.link.hear(stop)
        leases = []
        for entry_id, infra, data, flat in taken:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            lease = Lease(
                id=entry_id.decode(),
                prompt_id=fields.get(b"prompt", b"").decode(errors="replace"),
                payload=fields.get(b"payload", b""),
                infra_failures=infra,
                data_failures=data,
            )
            self._lose(lease.id)  # ours until it ran out: whoever still works on it must stop
            self.held[lease.id] = lease
            leases.append(lease)
        return Claim(
            leases=leases,
            wake=wake.decode(),
            due_s=None if due_ms < 0 else due_ms / 1000,
            finished=finished.decode(),
            open_prompts=open_prompts,
            feed_done=done == b"1",
            version=version,
            paused=bool(paused),
        )

    async def wait(self, claim: Claim, at_most_s: float = LONGEST_WAIT_S) -> None:
        """Block until another claim may bring more: something was added, a place came free, or a lease fell due."""
        due = LONGEST_WAIT_S if claim.due_s is None else claim.due_s + 0.001
        await self.link.wait(claim.wake, min(due, at_most_s))

    async def settle(self, lease: Lease, into: StageName, group: Group) -> None:
        """Put the output into the next stage and remove the input, if the lease still holds.

        Raises:
            LeaseLostError: it did not; the output is thrown away.
        """
        payload = await anyio.to_thread.run_sync(encode, group) if len(group.completions) > 64 else encode(group)
        await self._last(lease, "settle", into, lease.prompt_id, payload)

    async def release(self, lease: Lease, kind: Kind, error: str) -> bool:
        """Give an entry back. Returns True where it became a dead letter, because a budget is exhausted."""
        failures = {"infra": lease.infra_failures, "data": lease.data_failures, "none": 0}[kind]
        limit = {"infra": self.terms.infra_attempts, "data": self.terms.data_attempts, "none": 0}[kind]
        delay_ms = int(1000 * self.terms.backoff(failures)) if kind != "none" or error else 0
        log.info("entry.released", stage=self.name, prompt=lease.prompt_id, kind=kind, error=error[:300])
        return bool(await self._last(lease, "release", kind, limit, delay_ms, error[:4000]) == 2)

    async def bury(self, lease: Lease, reason: str, error: str) -> None:
        """Make an entry a dead letter at once."""
        log.warning("entry.buried", stage=self.name, prompt=lease.prompt_id, reason=reason, error=error[:300])
        await self._last(lease, "bury", reason, error[:4000])

    async def keep(self) -> None:
        """Renew all leases held, for ever; run it in the worker's task group."""
        while True:
            await anyio.sleep(self.terms.lease_s / 3)
            ids = list(self.held)
            if not ids:
                continue
            lease_ms = int(self.terms.lease_s * 1000)
            lost, stop = await self.link.script("renew", self.name, self.consumer, lease_ms, *ids)
            self.link.hear(stop)
            for entry_id in lost:
                self._lose(entry_id.decode())

    def _lose(self, entry_id: str) -> None:
        lease = self.held.get(entry_id)
        if lease is None or lease.ending:
            return
        log.warning("lease.lost", stage=self.name, prompt=lease.prompt_id)
        del self.held[entry_id]
        lease.lost = True
        if lease.scope is not None:
            lease.scope.cancel()

    async def _last(self, lease: Lease, verb: str, *args: str | bytes | int) -> int:
        """The verb that ends a lease."""
        lease.ending = True
        try:
            outcome: int = await self.link.script(verb, self.name, self.consumer, lease.id, *args)
        finally:
            if self.held.get(lease.id) is lease:
                del self.held[lease.id]
        if outcome == 0:
            lease.lost = True
            raise LeaseLostError(f"the lease on {lease.prompt_id or lease.id} in {self.name} ran out")
        return outcome
