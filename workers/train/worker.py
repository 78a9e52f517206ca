"""The trainer: scored groups in, policy versions out.

::

    begin     tenure (fencing) ─► newest whole checkpoint ─► ledger cut to its length ─► what the checkpoint lacks comes
              again ─► its weights to the engines, under a version number never used before
    a step    collect groups, ending those not worth training ─► optimizer ─► ledger lines ─► marks
    publish   reserve a number ─► weights on disk ─► engines ─► published (places given back)
    keep      ledger and checkpoint durable ─► marks acknowledged
    end       nothing open that is not in hand: the last, smaller batch is trained, then the run is finished
"""

import time
from collections.abc import Callable, Mapping

import anyio
import structlog

from stream.errors import RunFailedError
from stream.ledger import Ledger, Line, content_hash
from stream.records import Group
from stream.stage import Lease, Stage
from stream.training import End, Tenure
from stream.validity import DropReason
from workers.role import Role
from workers.settings import Settings
from workers.train.batch import collate
from workers.train.checkpoint import Checkpoints
from workers.train.hand import Hand
from workers.train.journal import Journal
from workers.train.learner import Learner, StepReport
from workers.train.progress import Progress
from workers.train.publisher import EnginePublisher
from workers.train.weights import Weights

log = structlog.get_logger()


async def train(role: Role, make_learner: Callable[[Settings], Learner] = Learner) -> None:
    """Train until every prompt has met its end, or `train.max_steps`.

    Args:
        role: settings and connection.
        make_learner: makes what is trained.
    """
    settings = role.settings
    async with anyio.create_task_group() as tasks:
        tenure = await Tenure.begin(role.link, settings.delivery.lease_s)
        tasks.start_soon(tenure.keep)
        checkpoints = Checkpoints(settings.folder / "checkpoints", settings.train.keep_last)
        learner, progress = await anyio.to_thread.run_sync(_load, settings, checkpoints, make_learner)
        ledger = await anyio.to_thread.run_sync(Ledger, settings.folder / "ledger.jsonl", progress.ledger_bytes)
        again = await tenure.recover(ledger)
        log.info("trainer.begun", step=progress.step, version=progress.version, groups_again=again)
        stage = Stage(role.link, "scored", role.consumer, role.terms)
        tasks.start_soon(stage.keep)
        publisher = EnginePublisher(settings.engine.urls, settings.delivery.reconnect_s)
        weights = Weights(settings.folder / "weights", tenure, publisher)
        tasks.start_soon(weights.keep_engines_current, settings.delivery.lease_s)
        try:
            await Trainer(role, tenure, stage, learner, checkpoints, ledger, weights, progress).run()
            await tenure.end()
        finally:
            ledger.close()
        tasks.cancel_scope.cancel()


class Trainer:
    """The trainer between steps, and its verbs."""

    def __init__(
        self,
        role: Role,
        tenure: Tenure,
        stage: Stage,
        learner: Learner,
        checkpoints: Checkpoints,
        ledger: Ledger,
        weights: Weights,
        progress: Progress,
    ) -> None:
        self.settings = role.settings
        self.stopping = role.stopping
        self.tenure = tenure
        self.stage = stage
        self.learner = learner
        self.checkpoints = checkpoints
        self.ledger = ledger
        self.weights = weights
        self.progress = progress
        self.hand = Hand(self.settings, ledger, learner.vocabulary)
        self.journal = Journal(self.settings.folder / "metrics.jsonl", progress.metrics_bytes)
        self._marked: list[str] = []
        """Entries ended since the last checkpoint."""
        self._kept = (progress.step, progress.ledger_bytes)
        """What the last checkpoint holds."""

    async def run(self) -> None:
        """Publish what the run begins with, then step until the end."""
        settings, progress = self.settings.train, self.progress
        await self._publish({})
        more, published = True, progress.step
        while more and not (settings.max_steps and progress.step >= settings.max_steps):
            began = time.monotonic()
            more = await self._collect()
            if self.stopping.is_set():
                await self._give_back()
                break
            if not self.hand.groups:
                break
            metrics = await self._step(began)
            if progress.step - published >= settings.publish_every or not more or progress.step == settings.max_steps:
                await self._publish(metrics)
                published = progress.step
            if progress.step - self._kept[0] >= settings.checkpoint_every:
                await self._checkpoint()
        await self._checkpoint()
        if not self.stopping.is_set():
            self._refuse_to_call_it_done()
            await self.tenure.finish(f"trained {progress.step} steps")
            log.info("trainer.finished", step=progress.step)

    def _refuse_to_call_it_done(self) -> None:
        """A run in which nobody measured anything must not end in silence, were it too short for the guard."""
        rows = self.progress.rows
        if rows and not rows.get("valid"):
            told = ", ".join(f"{state} {n}" for state, n in sorted(rows.items()))
            raise RunFailedError(f"not one of the run's {sum(rows.values())} completions was valid ({told})")

    async def _collect(self) -> bool:
        """Take groups into hand until they fill a step. False where nothing more will come, or a stop was asked for."""
        wanted, stall_s = self.settings.train.groups_per_step, self.settings.guard.stall_s
        last = time.monotonic()
        while len(self.hand.groups) < wanted:
            claim = await self.stage.claim(wanted - len(self.hand.groups))
            await self._consider(claim.leases)
            if self.stopping.is_set():
                return False
            if claim.leases or claim.paused:
                last = time.monotonic()
            if claim.leases:
                continue
            if claim.feed_done and claim.open_prompts <= len(self.hand.groups):
                return False
            if time.monotonic() - last > stall_s:
                raise RunFailedError(
                    f"no group came to be trained for guard.stall_s = {stall_s:g} s, while {claim.open_prompts} "
                    "prompts have met no end; `penstock queues` shows where they are, the workers' logs why"
                )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_when, self.stopping, tasks.cancel_scope)
                await self.stage.wait(claim)
                tasks.cancel_scope.cancel()
        return True

    async def _consider(self, leases: list[Lease]) -> None:
        """Take groups into hand; end those that are not worth training, bury what cannot be read."""
        ends: list[End] = []
        for lease in leases:
            judgement = await anyio.to_thread.run_sync(self.hand.consider, lease, self.weights.version)
            if judgement.unreadable:
                await self.stage.bury(lease, "unreadable", judgement.unreadable)
            elif judgement.unknown_schema:
                await self.stage.release(lease, "none", judgement.unknown_schema)
            elif judgement.ending:
                ends.append(End(lease, judgement.ending))
            if judgement.group is not None and judgement.ending.startswith("dropped:"):
                self.progress.dropped(judgement.states)
                self._note([judgement.group], [judgement.ending], self.progress.step + 1)
        await self._end(ends)

    async def _step(self, began: float) -> dict[str, float]:
        """One optimizer batch of the groups in hand."""
        leases, groups = self.hand.deal()
        version = self.weights.version
        dropped, filtered = self.hand.dropped()
        report = await anyio.to_thread.run_sync(_train_on, self.learner, groups, version, dropped, filtered)
        self.progress.stepped(report.metrics, len(groups) * report.trained, time.monotonic() - began)
        otherwise = "trained" if report.trained else f"dropped:{report.skipped}"
        ends = [
            f"dropped:{report.dropped[g.prompt.id]}" if g.prompt.id in report.dropped else otherwise for g in groups
        ]
        self._note(groups, ends, self.progress.step)
        await self._end([End(lease, end) for lease, end in zip(leases, ends, strict=True)])
        elapsed = time.monotonic() - began
        metrics = dict(report.metrics) | {
            "time": time.time(),
            "version": version,
            "step_seconds": elapsed,
            "tokens_per_second": report.metrics.get("tokens/sampled", 0) / elapsed,
        }
        await anyio.to_thread.run_sync(self.journal.append, metrics)
        return metrics

    def _note(self, groups: list[Group], ends: list[str], step: int) -> None:
        version = self.weights.version
        self.ledger.append(
            [Line(g.prompt.id, end, step, version, content_hash(g)) for g, end in zip(groups, ends, strict=True)]
        )

    async def _end(self, ends: list[End]) -> None:
        """Mark groups as ended; those trained give their place back with the next version."""
        if ends:
            lost = set(await self.tenure.commit(self.stage, ends, self.weights.version + 1))
            self._marked += [end.lease.id for end in ends if end.lease.id not in lost]

    async def _publish(self, metrics: dict[str, float]) -> None:
        await self.weights.publish(self.learner, self.progress.version, self.progress.step, metrics)
        self.progress.version = self.weights.version

    async def _checkpoint(self) -> None:
        """Make everything up to here durable, then let Redis forget it."""
        self.progress.ledger_bytes = await anyio.to_thread.run_sync(self.ledger.sync)
        reached = (self.progress.step, self.progress.ledger_bytes)
        if reached != self._kept or self.checkpoints.empty:
            self.progress.metrics_bytes = await anyio.to_thread.run_sync(lambda: self.journal.size)
            self.progress.close_period()
            await anyio.to_thread.run_sync(self.checkpoints.save, self.progress.step, self.learner, self.progress)
            self._kept = reached
        await self.tenure.acknowledge(self._marked)
        self._marked.clear()

    async def _give_back(self) -> None:
        for lease in self.hand.put_down():
            await self.stage.release(lease, "none", "")


def _load(
    settings: Settings, checkpoints: Checkpoints, make_learner: Callable[[Settings], Learner]
) -> tuple[Learner, Progress]:
    """The learner as its newest whole checkpoint left it, or as the run begins."""
    checkpoint = checkpoints.latest()
    learner = make_learner(settings)
    if checkpoint is None:
        return learner, Progress()
    checkpoint.restore(learner)
    return learner, checkpoint.progress


def _train_on(
    learner: Learner, groups: list[Group], version: int, dropped: Mapping[DropReason, int], filtered: list[Group]
) -> StepReport:
    """One step, and what it says of the groups that were dropped on the way to it."""
    return learner.step(collate(groups), version, filtered=collate(filtered) if filtered else None, dropped=dropped)


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
