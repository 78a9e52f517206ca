"""How the trainer's hand is filled: groups are claimed and judged until a step is full, or nothing more will come."""

import time

import anyio
import structlog
from msgspec import Struct, field

from stream.errors import LeaseLostError, RunFailedError
from stream.queue.stage import Claim, Lease, Stage
from stream.queue.versions import inflight_versions
from workers.runtime.idle_log import IdleLogger
from workers.settings import Settings
from workers.train.groups.group_buffer import GroupBuffer
from workers.train.groups.outcome_recorder import EndedGroup, OutcomeRecorder
from workers.train.groups.step_plan import StepPlan, VersionSchedule, plan_step
from workers.train.groups.straggler_wait import StragglerWait
from workers.train.progress import Progress

log = structlog.get_logger()


class CollectedBatch(Struct, frozen=True):
    """What a step is to be made of."""

    prompt_ids: list[str]
    """Prompts in hand; none where there is no step to make."""
    has_more: bool = False
    """Something may come after them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the waiting."""


class Collector:
    """Fills a hand, and says what of it makes a step.

    Args:
        settings: of the run.
        stage: of scored groups.
        buffer: to be filled.
        outcomes: where groups that are not worth training end.
        progress: of the run.
        stopping: set when the trainer is asked to stop.
    """

    def __init__(
        self,
        settings: Settings,
        stage: Stage,
        buffer: GroupBuffer,
        outcomes: OutcomeRecorder,
        progress: Progress,
        stopping: anyio.Event,
    ) -> None:
        self._settings = settings
        self._stage = stage
        self._buffer = buffer
        self._outcomes = outcomes
        self._progress = progress
        self._stopping = stopping
        self._waits_for_stragglers = settings.pacing.stale_policy == "wait"
        self._stragglers = StragglerWait(settings.pacing.straggler_timeout_s)
        self._idle_logger = IdleLogger(stage.name)

    async def collect(self, version: int, steps_left: int = 1) -> CollectedBatch:
        """Take groups into hand until there is a step to make, or nothing more will come, or a stop was asked for.

        Args:
            version: the policy version now.
            steps_left: until the next version is published, this one included.

        Raises:
            RunFailedError: nothing came for `abort.stall_timeout_s`, or too much of what came is invalid.
        """
        wanted, stall_s = self._settings.train.batch_size, self._settings.abort.stall_timeout_s
        last = time.monotonic()
        while True:
            # Who waits for some has to see all that has come, and holds it meanwhile: as much as may be outstanding.
            claim = await self._stage.claim(
                self._settings.capacity if self._waits_for_stragglers else wanted - len(self._buffer.groups)
            )
            await self._offer(claim.leases, version)
            if self._stopping.is_set():
                return CollectedBatch([])
            if claim.leases or claim.paused:
                last = time.monotonic()
            chosen = await self._plan_step(version, steps_left)
            over = claim.feed_done and claim.unfinished_prompts <= len(self._buffer.groups)
            full = len(chosen.prompt_ids) == wanted
            lacks = full and self._stragglers.should_wait([] if over else chosen.stragglers, paused=claim.paused)
            if over or (full and not lacks):
                more = not over or len(self._buffer.groups) > len(chosen.prompt_ids)
                return CollectedBatch(
                    chosen.prompt_ids, more, self._stragglers.pop_metrics() if self._waits_for_stragglers else {}
                )
            if claim.leases:
                self._idle_logger.end_wait()
                continue
            if not full and time.monotonic() - last > stall_s:
                raise RunFailedError(
                    f"no group came to be trained for abort.stall_timeout_s = {stall_s:g} s, while {claim.unfinished_prompts} "
                    "prompts have met no end; `penstock queues` shows where they are, the workers' logs why"
                )
            await self._wait(claim)

    async def _plan_step(self, version: int, steps_left: int) -> StepPlan:
        """What of the hand makes the step to come."""
        in_hand = self._buffer.groups
        if not self._waits_for_stragglers:
            return StepPlan(list(in_hand), [])
        ended = self._outcomes.ledger.outcomes
        starts = {
            prompt: start
            for prompt, start in (await inflight_versions(self._stage.connection)).items()
            if prompt not in ended
        }
        for prompt, (_, group) in in_hand.items():
            if prompt not in starts:  # it comes again; the server no longer knows when it was begun
                starts[prompt] = group.oldest_version if group.oldest_version is not None else version
        course = VersionSchedule(
            version=version,
            steps_left=steps_left,
            groups_per_step=self._settings.train.batch_size,
            groups_per_version=self._settings.groups_per_version,
            max_staleness=self._settings.pacing.max_staleness,
        )
        return plan_step(starts, in_hand, self._stragglers.abandoned(starts), course)

    async def _wait(self, claim: Claim) -> None:
        """Wait until there may be something new, or for whom we waited is given up."""
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when, self._stopping, tasks.cancel_scope)
            await self._stage.wait(claim, self._stragglers.remaining_s)
            tasks.cancel_scope.cancel()
        self._idle_logger.add_wait(time.monotonic() - began, claim)

    async def release_all(self) -> None:
        """Give back what is in hand."""
        for lease in self._buffer.clear():
            await self._release(lease, "")

    async def _offer(self, leases: list[Lease], version: int) -> None:
        """Take groups into hand; end those that are not worth training, bury what cannot be read."""
        ended: list[EndedGroup] = []
        for lease in leases:
            judgement = await anyio.to_thread.run_sync(self._buffer.offer, lease, version)
            if judgement.unreadable:
                await self._dead_letter(lease, judgement.unreadable)
            elif judgement.unknown_schema:
                await self._release(lease, judgement.unknown_schema)
            elif judgement.outcome:
                ended.append(EndedGroup(lease, judgement.outcome, judgement.group))
            if judgement.replaced is not None:
                ended.append(EndedGroup(judgement.replaced, f"duplicate:{lease.id}", None))
            self._progress.count_states(judgement.completion_states)
        await self._outcomes.record(ended, self._progress.step + 1, version)

    async def _dead_letter(self, lease: Lease, why: str) -> None:
        try:
            await self._stage.dead_letter(lease, "unreadable", why)
        except LeaseLostError as error:  # whoever has it now will find the same
            log.warning("lease.lost", why=str(error))

    async def _release(self, lease: Lease, why: str) -> None:
        try:
            await self._stage.release(lease, "none", why)
        except LeaseLostError as error:
            log.warning("lease.lost", why=str(error))


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
