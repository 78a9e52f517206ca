"""The trainer: scored groups in, policy versions out.

::

    begin    tenure and fence ─► newest whole checkpoint ─► ledger cut to its length ─► what the checkpoint lacks comes
             again ─► its weights to the engines, under a version number never used before
    train    step after step (`Trainer`)
    end      the right given up, so that a successor need not wait
"""

from collections.abc import Callable

import anyio
import structlog

from stream.queue.stage import Stage
from stream.trainer.archive import Archive
from stream.trainer.folder_lock import RunFolderLock, last_token
from stream.trainer.lease import TrainerLease
from stream.trainer.ledger import Ledger
from workers.engine_api.discovery.discovery import EngineDiscovery
from workers.runtime.context import WorkerContext
from workers.settings import Settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.evaluation.results import EvaluationLog
from workers.train.evaluation.scheduler import EvaluationScheduler
from workers.train.groups.outcome_recorder import OutcomeRecorder
from workers.train.metrics_log import MetricsLog
from workers.train.progress import Progress
from workers.train.publishing.policy_versions import PolicyVersions
from workers.train.publishing.publisher import open_publisher
from workers.train.step.learner import Learner
from workers.train.trainer import Trainer

log = structlog.get_logger()


async def train(context: WorkerContext, make_learner: Callable[[Settings], Learner] = Learner) -> None:
    """Train until every prompt has met its end, or `train.max_steps`.

    Args:
        context: settings and connection.
        make_learner: makes what is trained.
    """
    settings = context.settings
    discovery = await EngineDiscovery.from_settings(settings.engine, context.connection)
    async with open_publisher(settings, discovery) as publisher, anyio.create_task_group() as tasks:
        tasks.start_soon(discovery.watch)
        last_known_token = await anyio.to_thread.run_sync(last_token, settings.folder)
        trainer_lease = await TrainerLease.acquire(
            context.connection, settings.queue.lease_s, min_token=last_known_token
        )
        tasks.start_soon(trainer_lease.renew_forever)
        fence = await anyio.to_thread.run_sync(RunFolderLock.acquire, settings.folder, trainer_lease.token)
        checkpoints = CheckpointStore(settings.folder / "checkpoints", settings.train.max_checkpoints, fence)
        learner, progress = await anyio.to_thread.run_sync(_load, settings, checkpoints, make_learner)
        ledger = await anyio.to_thread.run_sync(Ledger, settings.folder / "ledger.jsonl", progress.ledger_bytes, fence)
        requeued = await trainer_lease.recover(ledger)
        log.info("trainer.started", step=progress.step, version=progress.version, groups_again=requeued)
        stage = Stage(context.connection, "scored", context.consumer, context.retry_policy)
        tasks.start_soon(stage.renew_leases)
        archive = await anyio.to_thread.run_sync(_open_archive, settings, fence)
        outcomes = OutcomeRecorder(ledger, trainer_lease, stage, archive)
        policy_versions = PolicyVersions(
            settings.folder / "weights", trainer_lease, publisher, tasks, retention_s=_retention_s(settings)
        )
        tasks.start_soon(policy_versions.update_outdated_engines)
        try:
            metrics_log = await anyio.to_thread.run_sync(
                MetricsLog, settings.folder / "metrics.jsonl", progress.metrics_bytes, fence
            )
            evaluation_log = await anyio.to_thread.run_sync(_open_evaluation_log, settings, progress, fence)
            evaluation = EvaluationScheduler(settings, trainer_lease, evaluation_log, context.stopping)
            trainer = Trainer(
                *(
                    context,
                    trainer_lease,
                    stage,
                    learner,
                    checkpoints,
                    outcomes,
                    policy_versions,
                    progress,
                    metrics_log,
                ),
                evaluation=evaluation,
            )
            await trainer.run()
            await trainer_lease.release()
        finally:
            ledger.close()
            if archive is not None:
                archive.close()
        tasks.cancel_scope.cancel()


def _load(
    settings: Settings, checkpoints: CheckpointStore, make_learner: Callable[[Settings], Learner]
) -> tuple[Learner, Progress]:
    """The learner as its newest whole checkpoint left it, or as the run begins."""
    checkpoint = checkpoints.latest()
    learner = make_learner(settings)
    if checkpoint is None:
        return learner, Progress()
    checkpoint.restore(learner)
    return learner, checkpoint.progress


def _retention_s(settings: Settings) -> float:
    """An engine reads an adapter again that it had no room for, as long as a request goes on with it."""
    return (
        settings.engine.request_timeout_s + settings.queue.reconnect_timeout_s if settings.publishes_adapters else 0.0
    )


def _open_evaluation_log(settings: Settings, progress: Progress, fence: RunFolderLock) -> EvaluationLog | None:
    return EvaluationLog(settings.folder, progress.step, fence) if settings.eval.path else None


def _open_archive(settings: Settings, fence: RunFolderLock | None) -> Archive | None:
    keep = settings.archive.keep
    if keep == "none":
        return None
    return Archive(settings.folder / "groups", None if keep == "all" else keep * 1_000_000, fence)
