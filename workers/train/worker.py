"""The trainer role: resume from the newest intact checkpoint, then train to the end of the run.

::

    start     trainer lease and folder lock ─► newest intact checkpoint ─► ledger cut to its length; groups that the
              checkpoint lacks come again ─► its weights to the engines, under a new version number
    train     step after step (`Trainer`)
    end       release the trainer lease, so that a successor need not wait for it to expire
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import structlog
from msgspec import Struct

from stream.connection.model_files import upload_model_files
from stream.queue.stage import Stage
from stream.trainer.archive import Archive
from stream.trainer.consume import open_consumer, open_trainer_lease
from stream.trainer.consumer import Consumer
from stream.trainer.folder_lock import RunFolderLock
from stream.trainer.leased_group import ResumePoint
from stream.trainer.trained_tokens import FOLDER, TrainedTokenFiles
from stream.trainer.trainer_lease import TrainerLease
from workers.engine_api.discovery import EngineDiscovery
from workers.role.context import WorkerContext
from workers.role.prometheus import count_step
from workers.runs.identity import flat_settings
from workers.runs.progress import Progress
from workers.runs.warnings import TrainingWarning, write_note, write_warnings
from workers.settings import Settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.checkpointing.object_store import RESTORED, Bucket, Uploader
from workers.train.evaluations import EvaluationLog, EvaluationScheduler
from workers.train.groups.collector import Collector
from workers.train.groups.group_checker import GroupChecker
from workers.train.metrics_log import MetricsLog
from workers.train.publishing.policy_versions import PolicyVersions
from workers.train.publishing.publisher import WeightPublisher, open_publisher
from workers.train.step.group_checks import CheckedGroup
from workers.train.step.learner import Learner
from workers.train.tracker_thread import import_early, open_trackers
from workers.train.trainer import Trainer

log = structlog.get_logger()


class _RunFiles(Struct):
    """What the trainer keeps in the run's folder, as of the checkpoint that it resumes from."""

    checkpoints: CheckpointStore
    learner: Learner
    progress: Progress
    metrics_log: MetricsLog
    evaluation_log: EvaluationLog | None
    archive: Archive | None

    def cut_logs(self) -> None:
        """Cut off what belongs to steps after the checkpoint."""
        self.metrics_log.cut()
        if self.evaluation_log is not None:
            self.evaluation_log.cut()


async def train(context: WorkerContext, make_learner: Callable[[Settings], Learner] = Learner) -> None:
    """Train until every prompt has an outcome, or `train.max_steps`.

    Args:
        context: settings and connection.
        make_learner: creates the policy and its optimizer.
    """
    settings = context.settings
    if risks := settings.opt_out_risks:
        log.warning(
            "trainer.opt_out_possible",
            settings=risks,
            effect="a policy that can make its completions invalid may learn to (docs/masking.md)",
        )
    flat = await anyio.to_thread.run_sync(flat_settings, settings)
    discovery = await EngineDiscovery.look_up(settings.engine.urls)
    async with (
        open_publisher(settings, discovery, context.stopping) as publisher,
        anyio.create_task_group() as tasks,
        open_trainer_lease(context.connection, settings.folder, settings.queue.lease_s, flat) as (
            trainer_lease,
            folder_lock,
        ),
    ):
        tasks.start_soon(discovery.watch)
        import_early(settings)  # while the model is loaded
        await upload_model_files(context.connection, settings.model.folder)
        files = await anyio.to_thread.run_sync(_open_files, settings, folder_lock, make_learner)
        checker = GroupChecker(settings, files.learner.vocab_size, files.progress)
        async with _open_consumer(context, trainer_lease, folder_lock, files, checker) as consumer:
            log.info(
                "trainer.started",
                step=files.progress.step,
                version=files.progress.version,
                groups_again=consumer.requeued_groups,
            )
            async with (
                _open_uploader(settings, folder_lock, files.checkpoints),
                open_trackers(settings, files.progress.step + 1) as trackers,
            ):
                files.metrics_log.subscribe(trackers.log)
                files.metrics_log.subscribe(count_step)
                context.readiness.mark_ready()
                await _train(settings, consumer, checker, publisher, files)
                if files.evaluation_log is not None:
                    trackers.log(files.evaluation_log.final_metrics(files.progress.step))
        tasks.cancel_scope.cancel()


async def _train(
    settings: Settings,
    consumer: Consumer[CheckedGroup],
    checker: GroupChecker,
    publisher: WeightPublisher,
    files: _RunFiles,
) -> None:
    async with anyio.create_task_group() as tasks:
        policy_versions = PolicyVersions(
            settings.folder / "weights", consumer, publisher, tasks, retention_s=_retention_s(settings)
        )
        tasks.start_soon(policy_versions.update_outdated_engines)
        trainer = Trainer(
            settings,
            Collector(settings, consumer, checker),
            files.learner,
            files.checkpoints,
            policy_versions,
            EvaluationScheduler(settings, consumer.trainer_lease, files.evaluation_log),
            files.metrics_log,
            files.progress,
        )
        await trainer.run()
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _open_consumer(
    context: WorkerContext,
    trainer_lease: TrainerLease,
    folder_lock: RunFolderLock,
    files: _RunFiles,
    checker: GroupChecker,
) -> AsyncIterator[Consumer[CheckedGroup]]:
    """Open the run's consumer at the checkpoint's resume point."""
    progress, restored = files.progress, context.settings.folder / RESTORED
    resume = ResumePoint(
        ledger_bytes=progress.ledger_bytes,
        ledger_digest=progress.ledger_digest,
        version=progress.version,
        step=progress.step,
        groups=progress.groups if progress.step else -1,
        resumed=tuple(progress.resumed),
        is_newest=not files.checkpoints.damaged,
        is_restored=await anyio.Path(restored).exists(),
    )
    stage = Stage(context.connection, "scored", context.consumer, context.retry_policy)
    ledger_path = context.settings.folder / "ledger.jsonl"
    try:
        async with open_consumer(
            *(trainer_lease, folder_lock, stage, ledger_path, resume, checker.check),
            archive=files.archive,
        ) as consumer:
            await anyio.to_thread.run_sync(files.cut_logs)
            if text := consumer.ledger.rebuilt_text:
                await anyio.to_thread.run_sync(_warn_of_rebuilt, context.settings.folder, text, progress.step)
            await anyio.to_thread.run_sync(partial(restored.unlink, missing_ok=True))
            yield consumer
    finally:
        if files.archive is not None:
            files.archive.close()


@asynccontextmanager
async def _open_uploader(
    settings: Settings, folder_lock: RunFolderLock, checkpoints: CheckpointStore
) -> AsyncIterator[None]:
    """Copy checkpoints to object storage, beginning with the newest; at the end wait for the last."""
    if not settings.storage.url:
        yield
        return

    def start() -> Uploader:
        checkpoints.uploader = Uploader(Bucket(settings), settings, folder_lock)
        if (newest := checkpoints.latest()) is not None:
            checkpoints.upload(newest)
        return checkpoints.uploader

    uploader = await anyio.to_thread.run_sync(start)
    yield
    await anyio.to_thread.run_sync(uploader.close, abandon_on_cancel=True)


def _open_files(
    settings: Settings, folder_lock: RunFolderLock, make_learner: Callable[[Settings], Learner]
) -> _RunFiles:
    """Load the newest intact checkpoint, if there is one. The logs are cut to it later: the server may refuse it."""
    checkpoints = CheckpointStore(settings.folder / "checkpoints", settings.train.max_checkpoints, folder_lock)
    checkpoint = checkpoints.require_latest()
    learner = make_learner(settings)
    progress = Progress()
    if checkpoint is not None:
        checkpoint.restore(learner)
        progress = checkpoint.progress
        progress.resumed = [*progress.resumed, (progress.step, progress.version)]
    _settle_micro_batches(settings.folder, learner, progress)
    evaluation_log = None
    if settings.eval.source:
        evaluation_log = EvaluationLog(settings.folder, progress.step, folder_lock)
    return _RunFiles(
        checkpoints=checkpoints,
        learner=learner,
        progress=progress,
        metrics_log=MetricsLog(settings.folder / "metrics.jsonl", progress.metrics_bytes, folder_lock),
        evaluation_log=evaluation_log,
        archive=_open_archive(settings, folder_lock),
    )


def _settle_micro_batches(folder: Path, learner: Learner, progress: Progress) -> None:
    """Use the tokens of a pass that the run has used so far, if they fit, so that it repeats bit for bit; record them.

    Have `penstock run` print what was chosen.
    """
    choice, recorded = learner.choice, progress.micro_batch_tokens
    if choice is None:
        return
    text, tokens = choice.text, choice.tokens
    if recorded and choice.allows(recorded[-1][1]):
        tokens = recorded[-1][1]
        learner.use_micro_batch_tokens(tokens)
        text = f"micro_batch_tokens = {tokens:,} as before"
    elif recorded:
        text = f"{text}; it was {recorded[-1][1]:,}, which does not fit into this memory"
    if not recorded or recorded[-1][1] != tokens:
        progress.micro_batch_tokens = [*recorded, (progress.step, tokens)]
    log.info("micro_batch.chosen", tokens=tokens, why=text)
    write_note(folder, TrainingWarning(name="micro_batch_tokens", text=text, step=progress.step, time=time.time()))


def _warn_of_rebuilt(folder: Path, text: str, step: int) -> None:
    """Have `penstock run` print what was rebuilt."""
    write_warnings(folder, [TrainingWarning(name="ledger_rebuilt", text=text, step=step, time=time.time())])


def _open_archive(settings: Settings, folder_lock: RunFolderLock | None) -> Archive | None:
    limits = settings.archive
    if limits.keep == "none":
        return None
    trained_tokens = TrainedTokenFiles(settings.folder / FOLDER, limits.max_trained_token_bytes)
    return Archive(settings.folder / "groups", limits.max_group_bytes, folder_lock, trained_tokens)


def _retention_s(settings: Settings) -> float:
    """An engine without room for an adapter reads it again later, for as long as a request names it."""
    if not settings.publishes_adapters:
        return 0.0
    return settings.engine.request_timeout_s + settings.queue.reconnect_timeout_s
