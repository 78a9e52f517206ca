"""One stage of the pipeline as one worker sees it: claim, renew, complete, release, dead-letter.

Each verb is one script (`stream/lua/`), which checks the lease and changes the stage in one atomic step. Leases are
renewed in the background while `Stage.renew_leases` runs, so a worker that is alive does not lose a lease because an
episode is long.

Policy versions are read here, too: the one at which each outstanding group was started (`inflight_versions`), and each
new one (`watch_versions`).
"""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import anyio
import msgspec
import structlog
from msgspec import Struct

from stream.codec import decode, encode
from stream.connection.keys import PROMPT_STAGES, RESERVED_CONSUMERS, EvaluationStage, StageName
from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.errors import LeaseLostError, PenstockError, RecordError, ServerError
from stream.queue.in_flight import GroupInFlight
from stream.queue.lease import Lease
from stream.records import Completion, Group, Scores
from stream.waiting import Backoff

log = structlog.get_logger()

ReleaseReason = Literal["infra", "data", "none", "stale"]
"""Why an entry is given back. `infra`: the worker, an engine or a service failed. `data`: the record is at fault.
`none`: the worker drains, or no engine answers. `stale`: the attempt was cancelled because newer policies overtook it.
`infra` and `data` count towards a limit, `RetryPolicy`."""


_INCOMING_S = 60.0
"""Seconds after which a record without an entry expires. The script that adds the entry is sent together with it."""
_RECORD_ABSENT = -1
"""Answer of the script `complete` if the record has expired: both have to be sent again."""
_MAX_SCORES_BYTES = 64 * 1024
"""Longer scores are sent with the whole record: a script takes a microsecond for each kilobyte that it handles."""
_COMPLETE_ATTEMPTS = 3
_MANY_COMPLETIONS = 64
_LONG_RECORD_BYTES = 1_000_000


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """How long a lease lasts, and how often an entry may fail."""

    lease_s: float = 15.0
    infra_attempts: int = 5
    """Failures for the reason `infra` after which an entry becomes a dead letter."""
    data_attempts: int = 2
    """The same for the reason `data`."""
    backoff_s: float = 0.5
    """Longest delay after the first failure, in seconds; it doubles with each further one, up to 60 times this."""

    def delay_s(self, failures: int) -> float:
        """Return the seconds before the next attempt, after this many earlier failures."""
        return Backoff(self.backoff_s, 60 * self.backoff_s).delay_s(failures + 1)


class Claim(Struct, kw_only=True):
    """The result of a claim: leases, and what to wait for if there are none."""

    leases: list[Lease]
    wake_id: str
    """Id of the last entry of the stream `wake`; later changes add entries after it."""
    next_due_s: float | None
    """Seconds until the next lease expires or a retry is due; None if there is none."""
    finish_reason: str
    """Why the run has ended; empty while it continues."""
    unfinished_prompts: int
    """Prompts without an outcome, in any stage; for an evaluation's stage, prompts without a result."""
    feed_done: bool
    """Whether nothing more will be fed."""
    version: int
    """The published policy version; -1 before the first."""
    paused: bool = False
    """Whether the run is paused, so that no prompts are handed out."""


class Stage:
    """A stage and this worker's leases in it.

    Args:
        connection: to the run.
        name: of the stage.
        consumer: this worker's name; never reused by another process.
        retry_policy: lease time and failure limits.
        capacity: for `prompts`: how many groups may be outstanding; None: no limit.
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
            raise PenstockError(f"a worker cannot be named {consumer!r}: that name owns entries without a worker")
        self.connection = connection
        self.name = name
        self.consumer = consumer
        self.retry_policy = retry_policy
        self.leases: dict[str, Lease] = {}
        """Held now, by entry id."""
        self._capacity = -1 if capacity is None else capacity

    async def claim(self, count: int) -> Claim:
        """Claim up to `count` entries. Never blocks.

        While the run is paused, no prompts are returned; once a stop was requested (`RunConnection.stopping`), nothing.
        """
        answer = await self.connection.run_script(
            *("claim", self.name, self.consumer, count, self._lease_ms, self.retry_policy.infra_attempts),
            *(self._capacity, self.connection.ignored_stop),
        )
        wake_id, due_ms, finish_reason, unfinished, done, version, entries, stop, paused = answer
        self.connection.observe_stop(stop)
        leases = []
        # Read before the leases are held: if reading fails, nobody renews them, and the entries are delivered again.
        payloads = await self._read_payloads([entry_id.decode() for entry_id, *_ in entries])
        for entry_id, infra, data, deaths, stale, flat, has_progress in entries:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            lease = Lease(
                id=entry_id.decode(),
                prompt_id=fields.get(b"prompt", b"").decode(errors="replace"),
                payload=fields.get(b"payload") or payloads.get(entry_id.decode()) or b"",
                scores=fields.get(b"scores", b""),
                infra_failures=infra,
                data_failures=data,
                deaths=deaths,
                cancelled_attempts_s=tuple(int(ms) / 1000 for ms in stale.split(b",") if ms),
                has_progress=bool(has_progress),
                evaluated_version=_parse_version(fields.get(b"version")),
                claimed_version=max(0, version),
                claimed_at=time.monotonic(),
            )
            self.mark_lost(lease.id)  # our own expired lease on this entry: its work must stop
            self.leases[lease.id] = lease
            leases.append(lease)
        return Claim(
            leases=leases,
            wake_id=wake_id.decode(),
            next_due_s=None if due_ms < 0 else due_ms / 1000,
            finish_reason=finish_reason.decode(),
            unfinished_prompts=unfinished,
            feed_done=done == b"1",
            version=version,
            paused=bool(paused),
        )

    async def wait(self, claim: Claim, timeout_s: float = MAX_BLOCK_S) -> None:
        """Block until another claim may return more: an entry was added, capacity was freed, or a lease is due."""
        due_s = MAX_BLOCK_S if claim.next_due_s is None else claim.next_due_s + 0.001
        await self.connection.wait_for_change(claim.wake_id, min(due_s, timeout_s))

    async def begin_alone(self, lease: Lease, description: str) -> None:
        """Record that this worker works on nothing else from now on: if it dies, its death is charged to this entry.

        Args:
            lease: of the entry.
            description: what the worker runs, for the dead letter that the entry may become.

        Raises:
            LeaseLostError: the lease is not held any more.
        """
        if not await self.connection.run_script("begin_alone", self.name, self.consumer, lease.id, description):
            self.mark_lost(lease.id)
            raise LeaseLostError(f"the lease on {lease.prompt_id or lease.id} in {self.name} expired")

    async def save_progress(self, parts: Sequence[bytes | int | str]) -> bool:
        """Save parts of unfinished groups, as `stream/lua/save_progress.lua` takes them; mark leases that are lost.

        Returns:
            False if the server is short of memory and has saved nothing.
        """
        is_refused, lost = await self.connection.run_script("save_progress", self.name, self.consumer, *parts)
        for entry_id in lost:
            self.mark_lost(entry_id.decode())
        return not is_refused

    async def load_progress(self, lease: Lease) -> tuple[list[Completion], dict[bytes, bytes]]:
        """Return the finished completions that earlier attempts saved, and the records of turns by their names.

        Unreadable completions are skipped and sampled again.
        """
        if not lease.has_progress:
            return [], {}
        completions = []
        for index, payload in (await self._load_parts(lease, "partials")).items():
            try:
                completion = decode(payload, Completion)
            except RecordError as error:
                log.warning("partial_completion.unreadable", stage=self.name, prompt=lease.prompt_id, why=str(error))
                continue
            if index == str(completion.index).encode():
                completions.append(completion)
        return completions, await self._load_parts(lease, "turns")

    async def _load_parts(self, lease: Lease, what: str) -> dict[bytes, bytes]:
        key = self.connection.key(f"{self.name}:{what}:{lease.id}")
        redis = self.connection.redis
        return await self.connection.with_retry(lambda: cast("Awaitable[dict[bytes, bytes]]", redis.hgetall(key)))

    async def complete(self, lease: Lease, next_stage: StageName | EvaluationStage, group: Group) -> None:
        """Add the output to the next stage and delete the input, if the lease is still held.

        Raises:
            LeaseLostError: the lease is not held any more; the output is discarded.
            ServerError: the server cannot take the output.
        """
        payload = await anyio.to_thread.run_sync(encode, group) if _is_long(group) else encode(group)
        token = uuid.uuid4().hex
        turns = sum(completion.turns for completion in group.completions) if self.name in PROMPT_STAGES else 0
        entry = (self.name, self.consumer, lease.id, next_stage, lease.prompt_id)
        arguments = ("complete", *entry, token, "", str(turns))
        for _ in range(_COMPLETE_ATTEMPTS):
            with self.ending([lease]):
                answer = await self.connection.store_and_run_script(
                    f"{next_stage}:incoming:{token}", payload, _INCOMING_S, *arguments
                )
            if answer != _RECORD_ABSENT:
                return self._check_held(lease, answer)
        raise ServerError(f"the group of {lease.prompt_id} expired {_COMPLETE_ATTEMPTS} times before it could be added")

    async def complete_scored(self, lease: Lease, group: Group) -> None:
        """Complete an entry of `groups` by sending only what scoring has added to the leased group, its `Scores`.

        The rollout's record stays on the server, which saves sending, storing and logging half of the bytes again.

        Raises:
            LeaseLostError: the lease is not held any more; the scores are discarded.
            ServerError: the server cannot take the scores.
        """
        scores = encode(Scores.of_group(group))
        if len(scores) <= _MAX_SCORES_BYTES:
            with self.ending([lease]):
                answer = await self.connection.run_script(
                    *("complete", self.name, self.consumer, lease.id, "scored", lease.prompt_id, "", scores)
                )
            if answer != _RECORD_ABSENT:
                self._check_held(lease, answer)
                return
        await self.complete(lease, "scored", group)

    async def record_evaluation(self, lease: Lease, result: bytes) -> None:
        """End a scored group of an evaluation: store its result (JSON) and delete the group.

        Raises:
            LeaseLostError: the lease is not held any more; the result is discarded.
        """
        await self._end_lease(lease, "record_evaluation", lease.prompt_id, result)

    async def release(self, lease: Lease, reason: ReleaseReason, error: str) -> bool:
        """Give an entry back. Returns True if it became a dead letter because a failure limit was reached.

        Raises:
            LeaseLostError: the lease is not held any more.
        """
        failures = {"infra": lease.infra_failures, "data": lease.data_failures}.get(reason, 0)
        limit = {"infra": self.retry_policy.infra_attempts, "data": self.retry_policy.data_attempts}.get(reason, 0)
        immediately = reason == "stale" or (reason == "none" and not error)
        delay_ms = 0 if immediately else int(1000 * self.retry_policy.delay_s(failures))
        held_ms = int(1000 * (time.monotonic() - lease.claimed_at))
        log.info("entry.released", stage=self.name, prompt=lease.prompt_id, reason=reason, error=error[:300])
        return await self._end_lease(lease, "release", reason, limit, delay_ms, error[:4000], held_ms) == 2

    async def dead_letter(self, lease: Lease, reason: str, error: str) -> None:
        """Move an entry to the dead letters.

        Raises:
            LeaseLostError: the lease is not held any more.
        """
        log.warning("entry.dead_lettered", stage=self.name, prompt=lease.prompt_id, reason=reason, error=error[:300])
        await self._end_lease(lease, "dead_letter", reason, error[:4000])

    def oldest_lease_age_s(self) -> float:
        """Return the seconds since the claim of the oldest lease held; 0 without any. Callable from any thread."""
        claimed_at = min((lease.claimed_at for lease in list(self.leases.values())), default=None)
        return 0.0 if claimed_at is None else time.monotonic() - claimed_at

    async def renew_leases(self) -> None:
        """Renew all held leases until cancelled; run it in the worker's task group."""
        while True:
            await anyio.sleep(self.retry_policy.lease_s / 3)
            ids = list(self.leases)
            if not ids:
                continue
            lost, stop = await self.connection.run_script(
                "renew_leases", self.name, self.consumer, self._lease_ms, *ids
            )
            self.connection.observe_stop(stop)
            for entry_id in lost:
                self.mark_lost(entry_id.decode())

    async def report_in_flight(self, groups: Sequence[GroupInFlight]) -> None:
        """Replace the report of what this worker does with its leases, for people; it expires as a lease does.

        Raises:
            ServerError: the server does not take the report.
        """
        key = self.connection.key(f"in_flight:{self.name}:{self.consumer}")
        payload = msgspec.json.encode(groups)
        await self.connection.with_retry(lambda: self.connection.redis.set(key, payload, px=self._lease_ms))

    @contextmanager
    def ending(self, leases: Sequence[Lease]) -> Iterator[None]:
        """Enclose a script that ends these leases: meanwhile none can become lost or stale; afterwards none is held."""
        for lease in leases:
            lease.begin_ending()
        try:
            yield
        finally:
            for lease in leases:
                if self.leases.get(lease.id) is lease:
                    del self.leases[lease.id]

    @property
    def _lease_ms(self) -> int:
        return int(self.retry_policy.lease_s * 1000)

    def mark_lost(self, entry_id: str) -> None:
        """Cancel the work on an entry whose lease is lost, unless a verb that ends it is in progress."""
        lease = self.leases.get(entry_id)
        if lease is None or lease.ending:
            return
        log.warning("lease.lost", stage=self.name, prompt=lease.prompt_id)
        del self.leases[entry_id]
        lease.mark_lost()

    async def _read_payloads(self, entry_ids: Sequence[str]) -> dict[str, bytes | None]:
        """Return the records that are stored beside these entries, by entry id; None for an entry that has ended."""
        if not entry_ids or self.name in PROMPT_STAGES:
            return {}
        payloads = await self.connection.read_values([f"{self.name}:payload:{entry_id}" for entry_id in entry_ids])
        return dict(zip(entry_ids, payloads, strict=True))

    async def _end_lease(self, lease: Lease, script: str, *args: str | bytes | int) -> int:
        with self.ending([lease]):
            answer: int = await self.connection.run_script(script, self.name, self.consumer, lease.id, *args)
        self._check_held(lease, answer)
        return answer

    def _check_held(self, lease: Lease, answer: int) -> None:
        if answer == 0:
            lease.lost = True
            raise LeaseLostError(f"the lease on {lease.prompt_id or lease.id} in {self.name} expired")


def _is_long(group: Group) -> bool:
    """Return whether encoding a group would hold the event loop for milliseconds."""
    if len(group.completions) > _MANY_COMPLETIONS:
        return True
    rows = (row for completion in group.completions for row in completion.rows)
    size = sum(len(row.prompt_ids) + len(row.token_ids) + len(row.logprobs) for row in rows)
    texts = (message.get("content") for completion in group.completions for message in completion.messages)
    return size + sum(len(text) for text in texts if isinstance(text, str)) > _LONG_RECORD_BYTES


def _parse_version(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None


async def inflight_versions(connection: RunConnection) -> dict[str, int]:
    """Return the policy version at which each outstanding group was started, by prompt id.

    Groups that are delivered again after their prompt had ended (trainer resumed, dead letter retried) are not
    included.
    """
    versions: Any = await connection.with_retry(
        lambda: connection.redis.zrange(connection.key("inflight_versions"), 0, -1, withscores=True)
    )
    return {prompt.decode(errors="replace"): int(version) for prompt, version in versions}


async def watch_versions(connection: RunConnection) -> AsyncIterator[int]:
    """Yield the current policy version, then each new one as it is published, forever.

    A slow reader may miss versions, but never the newest one.
    """
    after = "0-0"
    while True:
        answer: Any = await connection.with_retry(
            lambda after=after: connection.redis.xread(  # type: ignore[misc]
                {connection.key("published"): after}, block=int(1000 * MAX_BLOCK_S)
            )
        )
        for _, entries in answer:
            for entry, fields in entries:
                after = entry.decode()
                yield int(fields[b"version"])
