"""The trainer between steps, and its verbs.

::

    a step    collect groups, ending those not worth training ─► optimizer ─► ledger lines ─► marks
    publish   reserve a number ─► weights on disk ─► engines ─► published (places given back);
              not before the evaluation of the version before it has been sampled
    keep      ledger and checkpoint durable ─► marks acknowledged
    end       nothing open that is not in hand: the last, smaller batch is trained, then the run is finished
"""

import time
from collections.abc import Mapping

import anyio
import structlog

from stream.errors import RunFailedError
from stream.records import Group
from stream.stage import Stage
from stream.training import Tenure
from stream.validity import DropReason
from workers.role import Role
from workers.train.evaluation.evaluating import Evaluating
from workers.train.groups.attempts import attempt_metrics
from workers.train.groups.collecting import Collected, Collector
from workers.train.groups.endings import Ended, Endings
from workers.train.groups.hand import Hand
from workers.train.keeping.checkpoint import Checkpoints
from workers.train.keeping.journal import Journal
from workers.train.keeping.progress import Progress
from workers.train.publishing.weights import Weights
from workers.train.step.batch import collate
from workers.train.step.learner import Learner
from workers.train.step.report import StepReport

log = structlog.get_logger()


class Trainer:
    """The trainer between steps, and its verbs."""

    def __init__(  # noqa: PLR0913  (each is a thing of its own)
        self,
        role: Role,
        tenure: Tenure,
        stage: Stage,
        learner: Learner,
        checkpoints: Checkpoints,
        endings: Endings,
        weights: Weights,
        progress: Progress,
        journal: Journal,
        *,
        evaluating: Evaluating,
    ) -> None:
        self.settings = role.settings
        self.stopping = role.stopping
        self.tenure = tenure
        self.learner = learner
        self.checkpoints = checkpoints
        self.endings = endings
        self.weights = weights
        self.progress = progress
        self.hand = Hand(self.settings, endings.ledger, learner.vocabulary)
        self.collector = Collector(self.settings, stage, self.hand, endings, progress, role.stopping)
        self.journal = journal
        self.evaluating = evaluating
        self._kept = (progress.step, progress.ledger_bytes)
        """What the last checkpoint holds."""

    async def run(self) -> None:
        """Publish what the run begins with, then step until the end."""
        settings, progress = self.settings.train, self.progress
        await self.evaluating.start()
        await self._publish({})
        more, published, metrics = True, progress.step, dict[str, float]()
        while more and not (settings.max_steps and progress.step >= settings.max_steps):
            began = time.monotonic()
            collected = await self.collector.collect(
                self.weights.version, settings.publish_every - (progress.step - published)
            )
            if self.stopping.is_set():
                await self.collector.give_back()
                break
            if not collected.batch:
                break
            more = collected.more
            metrics = await self._step(began, collected)
            if progress.step - published >= settings.publish_every or not more or progress.step == settings.max_steps:
                await self._publish(metrics)
                published = progress.step
            if progress.step - self._kept[0] >= settings.checkpoint_every:
                await self._checkpoint()
        await self._checkpoint()
        if not self.stopping.is_set():
            if published != progress.step and self.evaluating.is_due_at_the_end(progress.step):
                await self._publish(metrics)
            await self.evaluating.end(self.weights.version, progress.step)
        if not self.stopping.is_set():  # it may have been set meanwhile
            self._refuse_to_call_it_done()
            await self.tenure.reconcile(self.endings.ledger)
            await self.tenure.finish(f"trained {progress.step} steps")
            log.info("trainer.finished", step=progress.step)

    def _refuse_to_call_it_done(self) -> None:
        """A run in which nobody measured anything must not end in silence, were it too short for the guard."""
        rows = self.progress.rows
        if rows and not rows.get("valid"):
            told = ", ".join(f"{state} {n}" for state, n in sorted(rows.items()))
            raise RunFailedError(f"not one of the run's {sum(rows.values())} completions was valid ({told})")

    async def _step(self, began: float, collected: Collected) -> dict[str, float]:
        """One optimizer batch of groups in hand."""
        leases, groups = self.hand.deal(collected.batch)
        version = self.weights.version
        dropped, filtered = self.hand.dropped()
        report = await anyio.to_thread.run_sync(_train_on, self.learner, groups, version, dropped, filtered)
        self.progress.stepped(report.metrics, len(groups) * report.trained, time.monotonic() - began)
        otherwise = "trained" if report.trained else f"dropped:{report.skipped}"
        ends = [
            f"dropped:{report.dropped[g.prompt.id]}" if g.prompt.id in report.dropped else otherwise for g in groups
        ]
        ended = [Ended(lease, end, group) for lease, end, group in zip(leases, ends, groups, strict=True)]
        await self.endings.end(ended, self.progress.step, version, in_step=True)
        await self.evaluating.look()
        elapsed = time.monotonic() - began
        metrics = (
            dict(report.metrics)
            | self.evaluating.metrics()
            | attempt_metrics(groups)
            | collected.metrics
            | {
                "time": time.time(),
                "version": version,
                "step_seconds": elapsed,
                "tokens_per_second": report.metrics.get("tokens/sampled", 0) / elapsed,
            }
        )
        await anyio.to_thread.run_sync(self.journal.append, metrics)
        return metrics

    async def _publish(self, metrics: dict[str, float]) -> None:
        await self.evaluating.hold()
        await self.weights.publish(self.learner, self.progress.version, self.progress.step, metrics)
        self.progress.version = self.weights.version
        await self.evaluating.published(self.weights.version, self.progress.step)

    async def _checkpoint(self) -> None:
        """Make everything up to here durable, then let Redis forget it."""
        self.progress.ledger_bytes = await self.endings.sync()
        reached = (self.progress.step, self.progress.ledger_bytes)
        if reached != self._kept or self.checkpoints.empty:
            self.progress.metrics_bytes = await anyio.to_thread.run_sync(lambda: self.journal.size)
            self.progress.close_period()
            await anyio.to_thread.run_sync(self.checkpoints.save, self.progress.step, self.learner, self.progress)
            self._kept = reached
        await self.endings.acknowledge()


def _train_on(
    learner: Learner, groups: list[Group], version: int, dropped: Mapping[DropReason, int], filtered: list[Group]
) -> StepReport:
    """One step, and what it says of the groups that were dropped on the way to it."""
    return learner.step(collate(groups), version, filtered=collate(filtered) if filtered else None, dropped=dropped)
