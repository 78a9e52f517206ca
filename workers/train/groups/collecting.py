"""How the trainer's hand is filled: groups are claimed and judged until a step is full, or nothing more will come."""

import time

import anyio
import structlog
from msgspec import Struct, field

from stream.errors import LeaseLostError, RunFailedError
from stream.pacing import begun
from stream.stage import Claim, Lease, Stage
from workers.lull import Lull
from workers.settings import Settings
from workers.train.groups.endings import Ended, Endings
from workers.train.groups.hand import Hand
from workers.train.groups.lateness import Course, Plan, plan
from workers.train.groups.stragglers import Stragglers
from workers.train.keeping.progress import Progress

log = structlog.get_logger()


class Collected(Struct, frozen=True):
    """What a step is to be made of."""

    batch: list[str]
    """Prompts in hand; none where there is no step to make."""
    more: bool = False
    """Something may come after them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the waiting."""


class Collector:
    """Fills a hand, and says what of it makes a step.

    Args:
        settings: of the run.
        stage: of scored groups.
        hand: to be filled.
        endings: where groups that are not worth training end.
        progress: of the run.
        stopping: set when the trainer is asked to stop.
    """

    def __init__(
        self,
        settings: Settings,
        stage: Stage,
        hand: Hand,
        endings: Endings,
        progress: Progress,
        stopping: anyio.Event,
    ) -> None:
        self._settings = settings
        self._stage = stage
        self._hand = hand
        self._endings = endings
        self._progress = progress
        self._stopping = stopping
        self._waits = settings.pacing.late == "wait"
        self._stragglers = Stragglers(settings.pacing.straggler_timeout_s)
        self._lull = Lull(stage.name)

    async def collect(self, version: int, steps_left: int = 1) -> Collected:
        """Take groups into hand until there is a step to make, or nothing more will come, or a stop was asked for.

        Args:
            version: the policy version now.
            steps_left: until the next version is published, this one included.

        Raises:
            RunFailedError: nothing came for `guard.stall_s`, or too much of what came is invalid.
        """
        wanted, stall_s = self._settings.train.groups_per_step, self._settings.guard.stall_s
        last = time.monotonic()
        while True:
            # Who waits for some has to see all that has come, and holds it meanwhile: as much as may be outstanding.
            claim = await self._stage.claim(self._settings.capacity if self._waits else wanted - len(self._hand.groups))
            await self._consider(claim.leases, version)
            if self._stopping.is_set():
                return Collected([])
            if claim.leases or claim.paused:
                last = time.monotonic()
            chosen = await self._choose(version, steps_left)
            over = claim.feed_done and claim.open_prompts <= len(self._hand.groups)
            full = len(chosen.batch) == wanted
            lacks = full and self._stragglers.keep_waiting([] if over else chosen.awaited, paused=claim.paused)
            if over or (full and not lacks):
                more = not over or len(self._hand.groups) > len(chosen.batch)
                return Collected(chosen.batch, more, self._stragglers.told() if self._waits else {})
            if claim.leases:
                self._lull.over()
                continue
            if not full and time.monotonic() - last > stall_s:
                raise RunFailedError(
                    f"no group came to be trained for guard.stall_s = {stall_s:g} s, while {claim.open_prompts} "
                    "prompts have met no end; `penstock queues` shows where they are, the workers' logs why"
                )
            await self._wait(claim)

    async def _choose(self, version: int, steps_left: int) -> Plan:
        """What of the hand makes the step to come."""
        in_hand = self._hand.groups
        if not self._waits:
            return Plan(list(in_hand), [])
        ended = self._endings.ledger.ends
        starts = {prompt: start for prompt, start in (await begun(self._stage.link)).items() if prompt not in ended}
        for prompt, (_, group) in in_hand.items():
            if prompt not in starts:  # it comes again; the server no longer knows when it was begun
                starts[prompt] = group.oldest_version if group.oldest_version is not None else version
        course = Course(
            version=version,
            steps_left=steps_left,
            groups_per_step=self._settings.train.groups_per_step,
            groups_per_version=self._settings.groups_per_version,
            max_staleness=self._settings.pacing.max_staleness,
        )
        return plan(starts, in_hand, self._stragglers.given_up(starts), course)

    async def _wait(self, claim: Claim) -> None:
        """Wait until there may be something new, or for whom we waited is given up."""
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when, self._stopping, tasks.cancel_scope)
            await self._stage.wait(claim, self._stragglers.left_s)
            tasks.cancel_scope.cancel()
        self._lull.went_on(time.monotonic() - began, claim)

    async def give_back(self) -> None:
        """Give back what is in hand."""
        for lease in self._hand.put_down():
            await self._give_up(lease, "")

    async def _consider(self, leases: list[Lease], version: int) -> None:
        """Take groups into hand; end those that are not worth training, bury what cannot be read."""
        ended: list[Ended] = []
        for lease in leases:
            judgement = await anyio.to_thread.run_sync(self._hand.consider, lease, version)
            if judgement.unreadable:
                await self._bury(lease, judgement.unreadable)
            elif judgement.unknown_schema:
                await self._give_up(lease, judgement.unknown_schema)
            elif judgement.ending:
                ended.append(Ended(lease, judgement.ending, judgement.group))
            if judgement.superseded is not None:
                ended.append(Ended(judgement.superseded, f"twin:{lease.id}", None))
            self._progress.dropped(judgement.states)
        await self._endings.end(ended, self._progress.step + 1, version)

    async def _bury(self, lease: Lease, why: str) -> None:
        try:
            await self._stage.bury(lease, "unreadable", why)
        except LeaseLostError as error:  # whoever has it now will find the same
            log.warning("lease.lost", why=str(error))

    async def _give_up(self, lease: Lease, why: str) -> None:
        try:
            await self._stage.release(lease, "none", why)
        except LeaseLostError as error:
            log.warning("lease.lost", why=str(error))


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
