"""Fills a step: polls the consumer until enough groups are buffered, or no more will come.

While a step trains, `prefetch` claims and checks what has arrived for the next one. With `pacing.stale_policy = "wait"`
a step waits for stragglers, for a bounded time.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import anyio
import anyio.to_thread
import structlog
from msgspec import Struct, field

from stream.connection.run_connection import MAX_BLOCK_S
from stream.errors import RunFailedError
from stream.operator.control import read_last_error
from stream.operator.status import describe_stages, read_status
from stream.queue.stage import Claim, inflight_versions
from stream.trainer.consumer import Consumer
from workers.role.work_loop import IdleLogger
from workers.runs.warnings import write_warnings
from workers.settings import Settings
from workers.train.groups.group_checker import GroupChecker
from workers.train.groups.step_plan import StepPlan, VersionSchedule, plan_step
from workers.train.step.group_checks import CheckedGroup

log = structlog.get_logger()

_PREFETCH_INTERVAL_S = 0.1
"""Between two polls while a step trains, for which every poll takes time: a busy run wakes its waiters many times per
second."""


class CollectedBatch(Struct, frozen=True):
    """What the next step consists of."""

    prompt_ids: list[str]
    """Prompts of buffered groups; empty if there is no next step."""
    has_more: bool = False
    """Groups may come after this step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """About waiting for groups, and for stragglers."""


class Collector:
    """Collects the groups of each step in the consumer's buffer.

    Args:
        settings: of the run.
        consumer: leases groups, and checks them with `checker`.
        checker: counts dropped groups.
    """

    def __init__(self, settings: Settings, consumer: Consumer[CheckedGroup], checker: GroupChecker) -> None:
        self.consumer = consumer
        self.pop_dropped = checker.pop_dropped
        self.pop_logged = checker.pop_logged
        self.observe_step = checker.observe_step
        self.warnings = checker.warnings
        self._settings = settings
        self._waits_for_stragglers = settings.pacing.stale_policy == "wait"
        self._stragglers = StragglerWait(settings.abort.trainer_wait_s)
        self._idle_logger = IdleLogger("scored")

    async def collect(self, steps_left: int = 1, is_publishing: Callable[[], bool] = lambda: False) -> CollectedBatch:
        """Poll until a step is full, no more groups will come, or a stop is requested (then the batch is empty).

        Args:
            steps_left: steps until the next policy version is published, the coming one included.
            is_publishing: whether a policy version is being published. Rollouts may have to wait for it, so this time
                counts towards no timeout.

        Raises:
            RunFailedError: no group came for `abort.stall_timeout_s`, or too many completions are invalid.
        """
        consumer = self.consumer
        batch_size, stall_timeout_s = self._settings.train.batch_size, self._settings.abort.stall_timeout_s
        started = last_arrival = time.monotonic()
        receiving_s = 0.0
        while True:
            await self.report_warnings()
            polled = time.monotonic()
            claim = await consumer.poll(self._free_places)
            if consumer.connection.stopping.is_set():
                return CollectedBatch([])
            halted = claim.paused or is_publishing()
            if claim.leases or halted:
                last_arrival = time.monotonic()
            if claim.leases:
                receiving_s += last_arrival - polled
            plan = await self._plan_step(steps_left)
            drained = consumer.is_drained(claim)
            full = len(plan.prompt_ids) == batch_size
            must_wait = full and self._stragglers.should_wait([] if drained else plan.stragglers, halted=halted)
            if drained or (full and not must_wait):
                has_more = not drained or len(consumer.buffer) > len(plan.prompt_ids)
                waiting_s = time.monotonic() - started - receiving_s
                return CollectedBatch(plan.prompt_ids, has_more, self._pop_metrics(waiting_s))
            if claim.leases:
                self._idle_logger.end_wait()
                continue
            if not full and time.monotonic() - last_arrival > stall_timeout_s:
                raise await self._stalled(claim)
            await self._wait(claim)

    async def prefetch(self) -> None:
        """Buffer groups of the next step while one trains, until the buffer is full or this is cancelled.

        Raises:
            RunFailedError: too many completions are invalid.
        """
        consumer = self.consumer
        while self._free_places > 0 and not consumer.connection.stopping.is_set():
            with anyio.CancelScope(shield=True):  # a poll cut short would leave groups leased and not buffered
                claim = await consumer.poll(self._free_places)
            if not claim.leases:
                await consumer.wait(claim)
            await anyio.sleep(_PREFETCH_INTERVAL_S)

    @property
    def _free_places(self) -> int:
        """How many more groups may be buffered.

        A trainer that waits for stragglers must see everything that has arrived, so it buffers up to the limit of
        outstanding groups.
        """
        if self._waits_for_stragglers:
            return self._settings.capacity
        return self._settings.train.batch_size - len(self.consumer.buffer)

    async def _stalled(self, claim: Claim) -> RunFailedError:
        """Return the error of a run whose workers send nothing: where its work is, and their last error."""
        last = await read_last_error(self.consumer.connection)
        where = describe_stages(await read_status(self.consumer.connection))
        return RunFailedError(
            f"no scored group arrived within abort.stall_timeout_s = {self._settings.abort.stall_timeout_s:g} s, but "
            f"{claim.unfinished_prompts} prompts are unfinished: {where}; {last or 'the logs of workers have more'}",
            last.cause if last else None,
        )

    async def report_warnings(self) -> None:
        """Log the warnings since the previous call, and write them to the run's folder."""
        if found := self.warnings.pop():
            await anyio.to_thread.run_sync(write_warnings, self._settings.folder, found)

    async def _plan_step(self, steps_left: int) -> StepPlan:
        """Choose the groups of the coming step from the buffer."""
        consumer = self.consumer
        if not self._waits_for_stragglers:
            return StepPlan(list(consumer.buffer), [])
        versions = await inflight_versions(consumer.connection)
        start_versions = {p: version for p, version in versions.items() if p not in consumer.ledger.outcomes}
        for prompt_id, leased in consumer.buffer.items():
            # After a restart the server no longer knows at which version a group started.
            oldest = leased.group.oldest_version
            start_versions.setdefault(prompt_id, consumer.version if oldest is None else oldest)
        schedule = VersionSchedule(
            version=consumer.version,
            steps_left=steps_left,
            groups_per_step=self._settings.train.batch_size,
            groups_per_version=self._settings.groups_per_version,
            max_staleness=self._settings.pacing.max_staleness,
        )
        return plan_step(start_versions, consumer.buffer, self._stragglers.abandoned(start_versions), schedule)

    async def _wait(self, claim: Claim) -> None:
        """Wait until another poll may return more, a straggler is to be abandoned, or a stop is requested."""
        started = time.monotonic()
        await self.consumer.wait(claim, self._stragglers.remaining_s)
        self._idle_logger.add_wait(time.monotonic() - started, claim)

    def _pop_metrics(self, waiting_s: float) -> dict[str, float]:
        stragglers = self._stragglers.pop_metrics() if self._waits_for_stragglers else {}
        return {"waiting_seconds": waiting_s, **stragglers}


_MAX_LOGGED_PROMPTS = 20


class StragglerWait:
    """Waits for groups until none has arrived for `timeout_s`; then it abandons all that are missing.

    Args:
        timeout_s: longest time without an arrival.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting_for: frozenset[str] = frozenset()
        self._last_arrival = 0.0
        """When the last straggler arrived, or the wait started."""
        self._wait_started = 0.0
        self._waited_s = 0.0
        self._abandoned_count = 0
        self._abandoned: dict[str, int] = {}
        """Start version by prompt: a group that starts again, at another version, is waited for like any other."""
        self._start_versions: Mapping[str, int] = {}

    def abandoned(self, start_versions: Mapping[str, int]) -> set[str]:
        """Return the outstanding prompts that are no longer waited for.

        Args:
            start_versions: of all outstanding groups, by prompt.
        """
        self._start_versions = start_versions
        self._abandoned = {
            prompt: version for prompt, version in self._abandoned.items() if start_versions.get(prompt) == version
        }
        return set(self._abandoned)

    def should_wait(self, stragglers: Sequence[str], *, halted: bool) -> bool:
        """Whether the step waits for these groups; False if there are none, or the timeout is over.

        Args:
            stragglers: prompts that the step lacks, the longest in flight first.
            halted: the run is paused, or its engines get new weights; this time does not count. Prompts of a dead
                worker are claimed again only after a pause.
        """
        now = time.monotonic()
        if not self._waiting_for and stragglers:
            log.info("stragglers.waiting", count=len(stragglers), prompts=list(stragglers[:_MAX_LOGGED_PROMPTS]))
            self._wait_started = self._last_arrival = now
        elif halted or not self._waiting_for <= set(stragglers):  # one arrived, or started again
            self._last_arrival = now
        if stragglers and now - self._last_arrival < self._timeout_s:
            self._waiting_for = frozenset(stragglers)
            return True
        if self._waiting_for:
            self._waited_s += now - self._wait_started
        if stragglers:
            log.warning(
                "stragglers.abandoned",
                after_s=self._timeout_s,
                count=len(stragglers),
                prompts=list(stragglers[:_MAX_LOGGED_PROMPTS]),
            )
            self._abandoned_count += len(stragglers)
            self._abandoned |= {prompt: self._start_versions[prompt] for prompt in stragglers}
        self._waiting_for = frozenset()
        return False

    @property
    def remaining_s(self) -> float:
        """Seconds until `should_wait` may answer differently."""
        if not self._waiting_for:
            return MAX_BLOCK_S
        return max(0.0, self._last_arrival + self._timeout_s - time.monotonic()) + 0.001

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the previous call."""
        metrics = {"stragglers/seconds": self._waited_s, "stragglers/abandoned": self._abandoned_count}
        self._waited_s, self._abandoned_count = 0.0, 0
        return metrics
