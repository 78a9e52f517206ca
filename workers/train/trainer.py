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
from stream.queue.stage import Stage
from stream.records import Group
from stream.trainer.lease import TrainerLease
from stream.validity import DropReason
from workers.runtime.context import WorkerContext
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.evaluation.scheduler import EvaluationScheduler
from workers.train.groups.attempts import attempt_metrics
from workers.train.groups.collector import CollectedBatch, Collector
from workers.train.groups.group_buffer import GroupBuffer
from workers.train.groups.outcome_recorder import EndedGroup, OutcomeRecorder
from workers.train.metrics_log import MetricsLog
from workers.train.progress import Progress
from workers.train.publishing.policy_versions import PolicyVersions
from workers.train.step.batch import collate
from workers.train.step.learner import Learner
from workers.train.step.report import StepReport

log = structlog.get_logger()


class Trainer:
    """The trainer between steps, and its verbs."""

    def __init__(  # noqa: PLR0913  (each is a thing of its own)
        self,
        context: WorkerContext,
        trainer_lease: TrainerLease,
        stage: Stage,
        learner: Learner,
        checkpoints: CheckpointStore,
        outcomes: OutcomeRecorder,
        policy_versions: PolicyVersions,
        progress: Progress,
        metrics_log: MetricsLog,
        *,
        evaluation: EvaluationScheduler,
    ) -> None:
        self.settings = context.settings
        self.stopping = context.stopping
        self.trainer_lease = trainer_lease
        self.learner = learner
        self.checkpoints = checkpoints
        self.outcomes = outcomes
        self.policy_versions = policy_versions
        self.progress = progress
        self.buffer = GroupBuffer(self.settings, outcomes.ledger, learner.vocab_size)
        self.collector = Collector(self.settings, stage, self.buffer, outcomes, progress, context.stopping)
        self.metrics_log = metrics_log
        self.evaluation = evaluation
        self._last_checkpoint = (progress.step, progress.ledger_bytes)
        """What the last checkpoint holds."""

    async def run(self) -> None:
        """Publish what the run begins with, then step until the end."""
        settings, progress = self.settings.train, self.progress
        await self.evaluation.discard_unfinished()
        await self._publish({})
        more, published, metrics = True, progress.step, dict[str, float]()
        while more and not (settings.max_steps and progress.step >= settings.max_steps):
            began = time.monotonic()
            collected = await self.collector.collect(
                self.policy_versions.version, settings.publish_every - (progress.step - published)
            )
            if self.stopping.is_set():
                await self.collector.release_all()
                break
            if not collected.prompt_ids:
                break
            more = collected.has_more
            metrics = await self._step(began, collected)
            if progress.step - published >= settings.publish_every or not more or progress.step == settings.max_steps:
                await self._publish(metrics)
                published = progress.step
            if progress.step - self._last_checkpoint[0] >= settings.save_every:
                await self._checkpoint()
        await self._checkpoint()
        if not self.stopping.is_set():
            if published != progress.step and self.evaluation.is_final_due(progress.step):
                await self._publish(metrics)
            await self.evaluation.evaluate_final(self.policy_versions.version, progress.step)
        if not self.stopping.is_set():  # it may have been set meanwhile
            self._fail_if_nothing_was_valid()
            await self.trainer_lease.reconcile_server(self.outcomes.ledger)
            await self.trainer_lease.finish_run(f"trained {progress.step} steps")
            log.info("trainer.finished", step=progress.step)

    def _fail_if_nothing_was_valid(self) -> None:
        """A run in which nobody measured anything must not end in silence, were it too short for the guard."""
        rows = self.progress.completion_states
        if rows and not rows.get("valid"):
            told = ", ".join(f"{state} {n}" for state, n in sorted(rows.items()))
            raise RunFailedError(f"not one of the run's {sum(rows.values())} completions was valid ({told})")

    async def _step(self, began: float, collected: CollectedBatch) -> dict[str, float]:
        """One optimizer batch of groups in hand."""
        leases, groups = self.buffer.pop(collected.prompt_ids)
        version = self.policy_versions.version
        dropped, filtered = self.buffer.pop_dropped()
        report = await anyio.to_thread.run_sync(_train_step, self.learner, groups, version, dropped, filtered)
        self.progress.count_step(report.metrics, len(groups) * report.trained, time.monotonic() - began)
        otherwise = "trained" if report.trained else f"dropped:{report.skipped}"
        ends = [
            f"dropped:{report.dropped[g.prompt.id]}" if g.prompt.id in report.dropped else otherwise for g in groups
        ]
        ended = [EndedGroup(lease, end, group) for lease, end, group in zip(leases, ends, groups, strict=True)]
        await self.outcomes.record(ended, self.progress.step, version, in_step=True)
        await self.evaluation.end_if_complete()
        elapsed = time.monotonic() - began
        metrics = (
            dict(report.metrics)
            | self.evaluation.pop_metrics()
            | attempt_metrics(groups)
            | collected.metrics
            | {
                "time": time.time(),
                "version": version,
                "step_seconds": elapsed,
                "tokens_per_second": report.metrics.get("tokens/sampled", 0) / elapsed,
            }
        )
        await anyio.to_thread.run_sync(self.metrics_log.append, metrics)
        return metrics

    async def _publish(self, metrics: dict[str, float]) -> None:
        await self.evaluation.wait_until_sampled()
        await self.policy_versions.publish(
            self.learner.save_weights, self.progress.version, self.progress.step, metrics
        )
        self.progress.version = self.policy_versions.version
        await self.evaluation.begin_if_due(self.policy_versions.version, self.progress.step)

    async def _checkpoint(self) -> None:
        """Make everything up to here durable, then let Redis forget it."""
        self.progress.ledger_bytes = await self.outcomes.sync()
        reached = (self.progress.step, self.progress.ledger_bytes)
        if reached != self._last_checkpoint or self.checkpoints.is_empty:
            self.progress.metrics_bytes = await anyio.to_thread.run_sync(lambda: self.metrics_log.size)
            self.progress.end_checkpoint_period()
            await anyio.to_thread.run_sync(self.checkpoints.save, self.progress.step, self.learner, self.progress)
            self._last_checkpoint = reached
        await self.outcomes.acknowledge()


def _train_step(
    learner: Learner, groups: list[Group], version: int, dropped: Mapping[DropReason, int], filtered: list[Group]
) -> StepReport:
    """One step, and what it says of the groups that were dropped on the way to it."""
    return learner.step(collate(groups), version, filtered=collate(filtered) if filtered else None, dropped=dropped)
