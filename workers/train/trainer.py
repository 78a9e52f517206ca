"""The training loop: collect groups, step, publish, checkpoint.

::

    step          collect groups ─► optimizer step, while groups of the next step are claimed and checked ─► commit:
                  archive, ledger records, marks on the server
    publish       reserve a version ─► copy the weights; then, while the next step trains: wait until the evaluation of
                  the version before has been sampled ─► write weights ─► push to engines ─► announce.
                  A step ends only after the publication that began before it
    checkpoint    ledger and checkpoint durable ─► committed groups are deleted from the server
    end           every unfinished prompt is buffered: train a last, smaller batch, then finish the run
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup

from stream.errors import EngineUnavailableError, RunFailedError
from stream.records import Group
from stream.trainer.leased_group import LeasedGroup, ResumePoint
from stream.wording import format_counts
from workers.role.prometheus import count_publication
from workers.runs.progress import Progress
from workers.settings import Settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.evaluations import EvaluationScheduler
from workers.train.groups.collector import CollectedBatch, Collector
from workers.train.groups.group_checker import DroppedGroups
from workers.train.metrics_log import MetricsLog
from workers.train.publishing.policy_versions import PolicyVersions
from workers.train.step.batch import merge_batches
from workers.train.step.group_checks import CheckedGroup
from workers.train.step.learner import Learner
from workers.train.step.step_metrics import StepReport, add_dropped

log = structlog.get_logger()


class Trainer:
    """Trains a run to its end.

    Args:
        settings: of the run.
        collector: collects the groups of each step.
        learner: policy and optimizer.
        checkpoints: the run's checkpoints.
        policy_versions: publishes weights.
        evaluation: begins evaluations and writes their results.
        metrics_log: receives the metrics of each step.
        progress: where the run is.
    """

    def __init__(
        self,
        settings: Settings,
        collector: Collector,
        learner: Learner,
        checkpoints: CheckpointStore,
        policy_versions: PolicyVersions,
        evaluation: EvaluationScheduler,
        metrics_log: MetricsLog,
        progress: Progress,
    ) -> None:
        self._settings = settings.train
        self._collector = collector
        self._consumer = collector.consumer
        self._learner = learner
        self._checkpoints = checkpoints
        self._policy_versions = policy_versions
        self._evaluation = evaluation
        self._metrics_log = metrics_log
        self._progress = progress
        self._published_step = progress.step
        """Step of the weights that were published last, or are being published."""
        self._published = anyio.Event()
        """Set unless a publication is in progress."""
        self._published.set()
        self._publication: dict[str, float] = {}
        """Metrics of the last publication."""
        self._saved = (progress.step, progress.ledger_bytes)
        """Step and ledger length of the last checkpoint."""

    async def run(self) -> None:
        """Publish the first version, then train until no groups are left, `train.max_steps`, or a stop request."""
        await self._evaluation.discard_unfinished()
        async with anyio.create_task_group() as tasks:
            await self._publish(tasks, {})
            await self._published.wait()
            metrics = await self._train(tasks)
            await self._consumer.checkpoint(self._save)
            await self._published.wait()
            step = self._progress.step
            if not self._is_stopping and self._published_step != step and self._evaluation.is_final_due(step):
                await self._publish(tasks, metrics)
        await self._end()

    async def _train(self, tasks: TaskGroup) -> dict[str, float]:
        """Train step after step; returns the metrics of the last one, whose publication may still be in progress."""
        settings, progress, metrics = self._settings, self._progress, dict[str, float]()
        has_more = True
        while has_more and not (settings.max_steps and progress.step >= settings.max_steps):
            started = time.monotonic()
            steps_left = settings.publish_every - (progress.step - self._published_step)
            batch = await self._collector.collect(steps_left, lambda: not self._published.is_set())
            if self._is_stopping:
                await self._consumer.release_all()
                break
            if not batch.prompt_ids:
                break
            has_more = batch.has_more
            metrics = await self._step(started, batch)
            is_last = not has_more or progress.step == settings.max_steps
            if is_last or progress.step - self._published_step >= settings.publish_every:
                await self._publish(tasks, metrics)
            if progress.step - self._saved[0] >= settings.save_every:
                await self._consumer.checkpoint(self._save)
        return metrics

    async def _end(self) -> None:
        """Evaluate the final policy and finish the run, unless the trainer was asked to stop."""
        progress = self._progress
        if not self._is_stopping:
            await self._evaluation.evaluate_final(self._consumer.version, progress.step)
        if not self._is_stopping:
            self._fail_if_nothing_was_valid()
            await self._consumer.finish(f"trained {progress.step} steps")
            log.info("trainer.finished", step=progress.step)

    @property
    def _is_stopping(self) -> bool:
        return self._consumer.connection.stopping.is_set()

    def _fail_if_nothing_was_valid(self) -> None:
        """Fail a run without one valid completion; a short run may end before `InvalidFractionMonitor` has a window."""
        states = self._progress.completion_states
        if states and not states.get("valid"):
            counts = format_counts(dict(sorted(states.items())))
            cause = self._progress.causes.get(max(states, key=lambda state: states[state]))
            why = f": {cause.short_headline}" if cause else ""
            total = sum(states.values())
            raise RunFailedError(f"not one of the run's {total} completions was valid ({counts}){why}", cause)

    async def _step(self, started: float, batch: CollectedBatch) -> dict[str, float]:
        """Train on one batch and commit its groups. Returns the metrics of the step."""
        leased, version = self._consumer.pop(batch.prompt_ids), self._consumer.version
        groups = [each.group for each in leased]
        dropped = self._collector.pop_dropped()
        async with anyio.create_task_group() as tasks:
            if batch.has_more and self._progress.step + 1 != self._settings.max_steps:
                tasks.start_soon(self._collector.prefetch)
            report = await anyio.to_thread.run_sync(_train_step, self._learner, leased, version, dropped)
            tasks.cancel_scope.cancel()
        reasons = _drop_reasons(report, leased)
        self._progress.count_step(report.metrics, len(leased) - len(reasons), time.monotonic() - started)
        await self._consumer.commit(leased, self._progress.step, reasons, report.completions)
        committed = time.monotonic()
        await self._published.wait()
        waited_s = time.monotonic() - committed
        self._collector.observe_step(groups, report.without_loss)
        await self._evaluation.end_if_complete()
        elapsed = time.monotonic() - started
        metrics = {
            **add_dropped(report.metrics, dropped.counters),
            **self._evaluation.pop_metrics(),
            **attempt_metrics(groups),
            **batch.metrics,
            **self._collector.pop_logged(),
            **self._publication,
            "time": time.time(),
            "version": version,
            "step_seconds": elapsed,
            "publish/waiting_seconds": waited_s,
            "tokens_per_second": report.metrics.get("tokens/sampled", 0) / elapsed,
        }
        await anyio.to_thread.run_sync(self._metrics_log.append, metrics)
        self._collector.warnings.observe_step(self._progress.step, metrics)
        await self._collector.report_warnings()
        return metrics

    async def _publish(self, tasks: TaskGroup, metrics: Mapping[str, float]) -> None:
        """Begin to publish the weights of this step; `_published` is set again at the end, and a failure ends the run.

        From here on the weights in training have the new version, so later groups are as old as they would be if the
        engines had it already.
        """
        started = time.monotonic()
        version, step = await self._policy_versions.reserve(), self._progress.step
        write = await anyio.to_thread.run_sync(self._learner.copy_weights)
        copied_s = time.monotonic() - started
        self._progress.version, self._published_step, self._published = version, step, anyio.Event()

        async def finish() -> None:
            await self._evaluation.wait_until_sampled()
            started = time.monotonic()
            try:
                await self._policy_versions.publish(version, write, step, metrics)
            except EngineUnavailableError as error:
                if not self._is_stopping:
                    raise
                log.warning("policy.not_published", version=version, why=str(error))  # the next start publishes it
                self._published.set()
                return
            elapsed = copied_s + time.monotonic() - started
            count_publication(version, elapsed)
            self._publication = {"publish/time": time.time(), "publish/seconds": elapsed}
            await self._evaluation.begin_if_due(version, step)
            self._published.set()

        tasks.start_soon(finish)

    def _save(self, resume_point: ResumePoint) -> None:
        """Save a checkpoint, unless the last one holds everything up to this point."""
        progress = self._progress
        progress.ledger_bytes, progress.ledger_digest = resume_point.ledger_bytes, resume_point.ledger_digest
        reached = (progress.step, progress.ledger_bytes)
        if reached != self._saved or self._checkpoints.is_empty:
            progress.metrics_bytes = self._metrics_log.size
            progress.end_checkpoint_period()
            self._checkpoints.save(progress.step, self._learner, progress)
            self._saved = reached


def attempt_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the tool calls of the batch, the mean duration of the attempts, and of the first ones at the same prompts.

    A cancelled attempt counts with the time that it had run, a lower bound of what it would have taken. Its number of
    tokens is unknown: an aborted request returns none.
    """
    if not groups:
        return {}
    completions = [completion for group in groups for completion in group.completions]
    trained = [group.rolled_out_at - group.claimed_at for group in groups]
    first = [
        group.cancelled_attempts_s[0] if group.cancelled_attempts_s else seconds
        for group, seconds in zip(groups, trained, strict=True)
    ]
    return {
        "attempt/seconds": sum(trained) / len(trained),
        "attempt/seconds_first": sum(first) / len(first),
        "attempt/cancelled": sum(len(group.cancelled_attempts_s) for group in groups),
        "tools/calls": sum(completion.tool_calls for completion in completions),
        "tools/errors": sum(completion.tool_errors for completion in completions),
    }


def _train_step(
    learner: Learner,
    leased: Sequence[LeasedGroup[CheckedGroup]],
    version: int,
    dropped: DroppedGroups,
) -> StepReport:
    batch = merge_batches([each.checked.batch for each in leased])
    return learner.step(batch, version, filtered=dropped.rewards, dropped=dropped.reasons)


def _drop_reasons(report: StepReport, leased: Sequence[LeasedGroup[Any]]) -> dict[str, str]:
    """Return why groups of a step were not trained on, by prompt id: all of them if the optimizer did not move."""
    reasons: dict[str, str] = {}
    if not report.trained:
        reasons = {each.group.prompt.id: report.skipped for each in leased}
    return reasons | report.dropped
