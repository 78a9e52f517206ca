"""One stage of the pipe, seen by one worker: claim, renew, settle, release, bury.

Async is a thin shell: each verb is one script (`lua/`), which is where the guarantees live. A lease is renewed in the
background for as long as `Stage.renew_leases` runs, so a worker that is alive never loses one because an episode is
long.
"""

import random
import time
from collections.abc import Awaitable
from typing import Any, Literal, cast

import anyio
import structlog
from msgspec import Struct

from stream.codec import decode, encode
from stream.connection.keys import RESERVED_CONSUMERS, EvaluationStage, StageName
from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.errors import LeaseLostError, PenstockError, RecordError
from stream.records import Completion, Group, Prompt

log = structlog.get_logger()

ReleaseReason = Literal["infra", "data", "none", "stale"]
"""Whose fault a release is: the world's, the record's own, or nobody's: a drain, an engine that is away, `stale`: the
attempt was cancelled for its age."""


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """How long a lease lasts, and how often an entry may fail."""

    lease_s: float = 15.0
    infra_attempts: int = 5
    data_attempts: int = 2
    backoff_s: float = 0.5

    def delay_s(self, failures: int) -> float:
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
    cancelled_attempts_s: tuple[float, ...] = ()
    """How long each attempt had run that was cancelled for its age; the first one first."""
    evaluated_version: int | None = None
    """Of a prompt of an evaluation: the policy version that is to sample it."""
    claimed_version: int = 0
    """The policy version at the claim; 0 before the first is published, since nothing is sampled before."""
    claimed_at: float = 0.0
    """By this process's monotonic clock, in seconds."""
    scope: anyio.CancelScope | None = None
    """Set by whoever works on it: cancelled the moment the lease is known to be lost, or overtaken."""
    lost: bool = False
    stale: bool = False
    """The work was cancelled for its age; whoever does it gives the entry back as `stale`."""
    ending: bool = False
    """The verb that ends it is under way, and will itself say whether it still held."""

    def prompt(self) -> Prompt:
        """The record of an entry of `prompts`.

        Raises:
            NewerSchemaError: a newer major version wrote it: release the lease.
            RecordError: it is no prompt, or another one than the entry names: bury the lease.
        """
        prompt = decode(self.payload, Prompt)
        self._check_name(prompt.id)
        return prompt

    def group(self) -> Group:
        """The record of an entry of `groups` or `scored`.

        Raises:
            NewerSchemaError: a newer major version wrote it: release the lease.
            RecordError: it is no group, or another prompt's than the entry names: bury the lease.
        """
        group = decode(self.payload, Group)
        self._check_name(group.prompt.id)
        return group

    def _check_name(self, prompt_id: str) -> None:
        """What ends an entry ends the prompt that it names, so that has to be the one that was worked on."""
        if prompt_id != self.prompt_id:
            raise RecordError(f"the entry names prompt {self.prompt_id!r}, its record prompt {prompt_id!r}")


class Claim(Struct, kw_only=True):
    """What a claim returned: entries, or what to wait for."""

    leases: list[Lease]
    wake_id: str
    next_due_s: float | None
    finish_reason: str
    """Why the run has ended; empty while it goes on."""
    unfinished_prompts: int
    """Prompts without an end, wherever they are; of an evaluation's stage, those that have no outcome yet."""
    feed_done: bool
    version: int
    """The published policy version; -1 before the first."""
    paused: bool = False
    """No prompts are handed out, whatever there is."""


class Stage:
    """A stage and this worker's leases in it.

    Args:
        connection: the run's connection.
        name: which stage.
        consumer: this worker's name; never reused by another process.
        retry_policy: lease time and budgets.
        capacity: for `prompts`: groups that may be outstanding; None: no bound.
    """

    def __init__(
        self,
        connection: RunConnection,
        name: StageName | EvaluationStage,
        consumer: str,
        retry_policy: RetryPolicy,
        capacity: int | None = None,
    ) -> None:
        if consumer in RESERVED_CONSUMERS:
            raise PenstockError(f"a worker cannot be called {consumer!r}: that name stands for entries nobody works on")
        self.connection = connection
        self.name = name
        self.consumer = consumer
        self.retry_policy = retry_policy
        self.leases: dict[str, Lease] = {}
        self._capacity = -1 if capacity is None else capacity

    async def claim(self, count: int) -> Claim:
        """Claim up to `count` entries; never blocks.

        Of prompts none while the run is paused, of anything none once the run was asked to stop (`Link.stopping`).
        """
        lease_ms = int(self.retry_policy.lease_s * 1000)
        answer = await self.connection.run_script(
            *("claim", self.name, self.consumer, count, lease_ms, self.retry_policy.infra_attempts, self._capacity),
            self.connection.ignored_stop,
        )
        wake, due_ms, finished, open_prompts, done, version, taken, stop, paused = answer
        self.connection.observe_stop(stop)
        leases = []
        for entry_id, infra, data, late, flat in taken:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            lease = Lease(
                id=entry_id.decode(),
                prompt_id=fields.get(b"prompt", b"").decode(errors="replace"),
                payload=fields.get(b"payload", b""),
                infra_failures=infra,
                data_failures=data,
                cancelled_attempts_s=tuple(int(ms) / 1000 for ms in late.split(b",") if ms),
                evaluated_version=_parse_version(fields.get(b"version")),
                claimed_version=max(0, version),
                claimed_at=time.monotonic(),
            )
            self._mark_lost(lease.id)  # ours until it ran out: whoever still works on it must stop
            self.leases[lease.id] = lease
            leases.append(lease)
        return Claim(
            leases=leases,
            wake_id=wake.decode(),
            next_due_s=None if due_ms < 0 else due_ms / 1000,
            finish_reason=finished.decode(),
            unfinished_prompts=open_prompts,
            feed_done=done == b"1",
            version=version,
            paused=bool(paused),
        )

    async def wait(self, claim: Claim, timeout_s: float = MAX_BLOCK_S) -> None:
        """Block until another claim may bring more: something was added, a place came free, or a lease fell due."""
        due = MAX_BLOCK_S if claim.next_due_s is None else claim.next_due_s + 0.001
        await self.connection.wait_for_change(claim.wake_id, min(due, timeout_s))

    async def save_partial(self, lease: Lease, completion: Completion) -> None:
        """Keep a completion of a group that is not finished, for whoever has the prompt next, should this lease end.

        Whatever became of it: one that failed is a fact of its group, and to try it again would be to choose by the
        outcome. Settling, and whatever else ends the entry, removes what was kept. Nothing depends on it, so a server
        that has no memory to spare is waited for no longer than a lease lasts.
        """
        payload = encode(completion)
        with anyio.move_on_after(self.retry_policy.lease_s):
            if not await self.connection.run_script(
                "save_partial", self.name, self.consumer, lease.id, completion.index, payload
            ):
                self._mark_lost(lease.id)

    async def load_partial(self, lease: Lease) -> list[Completion]:
        """What was kept by those who had this entry before; junk among it is passed by, and played again."""
        key = self.connection.key(f"{self.name}:partials:{lease.id}")
        records: Any = await self.connection.with_retry(
            lambda: cast("Awaitable[Any]", self.connection.redis.hgetall(key))
        )
        found = []
        for index, payload in records.items():
            try:
                completion = decode(payload, Completion)
            except RecordError as error:
                log.warning("partial_completion.unreadable", stage=self.name, prompt=lease.prompt_id, why=str(error))
                continue
            if index == str(completion.index).encode():
                found.append(completion)
        return found

    async def complete(self, lease: Lease, next_stage: StageName | EvaluationStage, group: Group) -> None:
        """Put the output into the next stage and remove the input, if the lease still holds.

        Raises:
            LeaseLostError: it did not; the output is thrown away.
        """
        payload = await anyio.to_thread.run_sync(encode, group) if len(group.completions) > 64 else encode(group)
        await self._end_lease(lease, "complete", next_stage, lease.prompt_id, payload)

    async def record_evaluation(self, lease: Lease, outcome: bytes) -> None:
        """End a scored group of an evaluation: what came of it is kept, in JSON, the group is not.

        Raises:
            LeaseLostError: the lease did not hold any more; the outcome is thrown away.
        """
        await self._end_lease(lease, "record_evaluation", lease.prompt_id, outcome)

    async def release(self, lease: Lease, reason: ReleaseReason, error: str) -> bool:
        """Give an entry back. Returns True where it became a dead letter, because a budget is exhausted."""
        failures = {"infra": lease.infra_failures, "data": lease.data_failures}.get(reason, 0)
        limit = {"infra": self.retry_policy.infra_attempts, "data": self.retry_policy.data_attempts}.get(reason, 0)
        at_once = reason == "stale" or (reason == "none" and not error)
        delay_ms = 0 if at_once else int(1000 * self.retry_policy.delay_s(failures))
        held_ms = int(1000 * (time.monotonic() - lease.claimed_at))
        log.info("entry.released", stage=self.name, prompt=lease.prompt_id, kind=reason, error=error[:300])
        return bool(await self._end_lease(lease, "release", reason, limit, delay_ms, error[:4000], held_ms) == 2)

    async def dead_letter(self, lease: Lease, reason: str, error: str) -> None:
        """Make an entry a dead letter at once."""
        log.warning("entry.dead_lettered", stage=self.name, prompt=lease.prompt_id, reason=reason, error=error[:300])
        await self._end_lease(lease, "dead_letter", reason, error[:4000])

    def cancel_stale(self, lease: Lease) -> None:
        """Cancel the work on a lease for its age, unless it is being ended at this moment."""
        if lease.scope is not None and not lease.ending:
            lease.stale = True
            lease.scope.cancel()

    async def renew_leases(self) -> None:
        """Renew all leases held, for ever; run it in the worker's task group."""
        while True:
            await anyio.sleep(self.retry_policy.lease_s / 3)
            ids = list(self.leases)
            if not ids:
                continue
            lease_ms = int(self.retry_policy.lease_s * 1000)
            lost, stop = await self.connection.run_script("renew_leases", self.name, self.consumer, lease_ms, *ids)
            self.connection.observe_stop(stop)
            for entry_id in lost:
                self._mark_lost(entry_id.decode())

    def _mark_lost(self, entry_id: str) -> None:
        lease = self.leases.get(entry_id)
        if lease is None or lease.ending:
            return
        log.warning("lease.lost", stage=self.name, prompt=lease.prompt_id)
        del self.leases[entry_id]
        lease.lost = True
        if lease.scope is not None:
            lease.scope.cancel()

    async def _end_lease(self, lease: Lease, verb: str, *args: str | bytes | int) -> int:
        """The verb that ends a lease."""
        lease.ending = True
        try:
            outcome: int = await self.connection.run_script(verb, self.name, self.consumer, lease.id, *args)
        finally:
            if self.leases.get(lease.id) is lease:
                del self.leases[lease.id]
        if outcome == 0:
            lease.lost = True
            raise LeaseLostError(f"the lease on {lease.prompt_id or lease.id} in {self.name} ran out")
        return outcome


def _parse_version(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None
