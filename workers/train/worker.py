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

from stream.archive import Archive
from stream.fence import Fence, last_token
from stream.ledger import Ledger
from stream.stage import Stage
from stream.training import Tenure
from workers.fleet.roster import Roster
from workers.role import Role
from workers.settings import Settings
from workers.train.evaluation.evaluating import Evaluating
from workers.train.evaluation.figures import Evaluations
from workers.train.groups.endings import Endings
from workers.train.keeping.checkpoint import Checkpoints
from workers.train.keeping.journal import Journal
from workers.train.keeping.progress import Progress
from workers.train.publishing.publisher import open_publisher
from workers.train.publishing.weights import Weights
from workers.train.step.learner import Learner
from workers.train.trainer import Trainer

log = structlog.get_logger()


async def train(role: Role, make_learner: Callable[[Settings], Learner] = Learner) -> None:
    """Train until every prompt has met its end, or `train.max_steps`.

    Args:
        role: settings and connection.
        make_learner: makes what is trained.
    """
    settings = role.settings
    roster = await Roster.of(settings.engine, role.link)
    async with open_publisher(settings, roster) as publisher, anyio.create_task_group() as tasks:
        tasks.start_soon(roster.watch)
        known = await anyio.to_thread.run_sync(last_token, settings.folder)
        tenure = await Tenure.begin(role.link, settings.delivery.lease_s, above=known)
        tasks.start_soon(tenure.keep)
        fence = await anyio.to_thread.run_sync(Fence.take, settings.folder, tenure.token)
        checkpoints = Checkpoints(settings.folder / "checkpoints", settings.train.keep_last, fence)
        learner, progress = await anyio.to_thread.run_sync(_load, settings, checkpoints, make_learner)
        ledger = await anyio.to_thread.run_sync(Ledger, settings.folder / "ledger.jsonl", progress.ledger_bytes, fence)
        again = await tenure.recover(ledger)
        log.info("trainer.begun", step=progress.step, version=progress.version, groups_again=again)
        stage = Stage(role.link, "scored", role.consumer, role.terms)
        tasks.start_soon(stage.keep)
        archive = await anyio.to_thread.run_sync(_archive, settings, fence)
        endings = Endings(ledger, tenure, stage, archive)
        weights = Weights(settings.folder / "weights", tenure, publisher, tasks, linger_s=_linger_s(settings))
        tasks.start_soon(weights.keep_engines_current)
        try:
            journal = await anyio.to_thread.run_sync(
                Journal, settings.folder / "metrics.jsonl", progress.metrics_bytes, fence
            )
            book = await anyio.to_thread.run_sync(_evaluations, settings, progress, fence)
            evaluating = Evaluating(settings, tenure, book, role.stopping)
            trainer = Trainer(
                *(role, tenure, stage, learner, checkpoints, endings, weights, progress, journal), evaluating=evaluating
            )
            await trainer.run()
            await tenure.end()
        finally:
            ledger.close()
            if archive is not None:
                archive.close()
        tasks.cancel_scope.cancel()


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


def _linger_s(settings: Settings) -> float:
    """An engine reads an adapter again that it had no room for, as long as a request goes on with it."""
    return settings.engine.request_timeout_s + settings.delivery.reconnect_s if settings.publishes_adapters else 0.0


def _evaluations(settings: Settings, progress: Progress, fence: Fence) -> Evaluations | None:
    return Evaluations(settings.folder, progress.step, fence) if settings.eval.path else None


def _archive(settings: Settings, fence: Fence | None) -> Archive | None:
    keep, megabytes = settings.archive.keep, settings.archive.megabytes
    if keep == "none":
        return None
    return Archive(settings.folder / "groups", megabytes * 1_000_000 if keep == "latest" else None, fence)
