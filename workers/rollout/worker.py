"""The rollout worker: claims prompts, rolls out many groups concurrently, and completes them.

Prompts of evaluations are rolled out next to the run's own. With `pacing.stale_policy = "cancel"`, attempts that newer
policies made too old are cancelled and started again.
"""

import gc
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import anyio
import structlog

from envs.factory import EnvironmentFactory
from stream.errors import RecordError, SettingsError
from stream.queue.evaluation import create_evaluation_streams
from stream.queue.in_flight import Activity
from stream.queue.lease import Lease
from stream.queue.progress_writer import ProgressWriter
from stream.queue.stage import Stage, watch_versions
from stream.waiting import cancel_on
from workers.engine_api.discovery import EngineDiscovery
from workers.role import prometheus
from workers.role.concurrency import ConcurrencyLimit, SharedExclusiveLock
from workers.role.context import WorkerContext
from workers.role.in_flight_reporter import InFlightReporter
from workers.role.rewards import load_factories
from workers.role.work_loop import work_loop
from workers.rollout.chat.chat_setup import ChatSetup, load_chat_setups, open_model_folder
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner, open_group_runner, with_attempt
from workers.rollout.sandbox_host import SandboxOwner
from workers.rollout.sandbox_reaper import SandboxReaper
from workers.rollout.turn_journal import TurnJournal
from workers.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRollout:
    """Rolls out prompts of evaluations, each at the policy version that its entry names."""

    stage: Stage
    runner: GroupRunner
    in_flight: InFlightReporter
    concurrency: ConcurrencyLimit
    """Within the worker's own limit."""

    async def work(self, lease: Lease, _version: int) -> None:
        """Roll out one prompt, and complete its lease.

        Raises:
            RecordError: the entry names no policy version.
        """
        if lease.evaluated_version is None:
            raise RecordError("the entry does not name the policy version to evaluate")
        claimed_at, prompt = time.time(), lease.prompt()
        with self.in_flight.group(lease, prompt.environment) as progress:
            owner = SandboxOwner(self.stage, lease)
            group = await self.runner.run(
                prompt, min_policy_version=lease.evaluated_version, progress=progress, owner=owner
            )
            progress.activity = Activity.COMPLETE
            await self.stage.complete(
                lease, "eval:groups", with_attempt(group, lease, worker=self.stage.consumer, claimed_at=claimed_at)
            )


@asynccontextmanager
async def open_evaluation(
    context: WorkerContext, runner: GroupRunner, concurrency: ConcurrencyLimit
) -> AsyncIterator[EvaluationRollout | None]:
    """Open what evaluations need; None if the settings have no `[eval]` prompts.

    Evaluations use separate environment instances, so none of their episodes affects one that is trained. They
    never take the last place of the worker's limit, so training continues.

    Args:
        context: of the worker.
        runner: of the run's own prompts.
        concurrency: the worker's limit of groups in flight.
    """
    settings = context.settings
    if not settings.eval.source:
        yield None
        return
    await create_evaluation_streams(context.connection)
    max_groups = settings.evaluation_groups_in_flight(concurrency.limit)
    limits = settings.for_evaluation.rollout
    async with EnvironmentPool(runner.factories, size=max_groups * limits.group_size) as pool:
        stage = Stage(context.connection, "eval:prompts", context.consumer, context.retry_policy)
        yield EvaluationRollout(
            stage=stage,
            in_flight=InFlightReporter(stage),
            runner=replace(runner, pool=pool, limits=limits),
            concurrency=ConcurrencyLimit(max_groups, parent=concurrency if max_groups < concurrency.limit else None),
        )


MAX_CANCELLATIONS = 2
"""Per prompt; after that the prompt is finished, however old it gets."""


def should_cancel(claimed_version: int, version: int, max_staleness: int, cancellations: int) -> bool:
    """Return whether to cancel an attempt.

    Args:
        claimed_version: policy version when the attempt started.
        version: newest policy version.
        max_staleness: allowed difference of the two.
        cancellations: earlier attempts at the same prompt that were cancelled.
    """
    return version - claimed_version > max_staleness and cancellations < MAX_CANCELLATIONS


class StaleCanceller:
    """Cancels attempts of one worker as soon as they are too old, which also aborts their requests at the engines.

    Args:
        stage: with the worker's leases.
        max_staleness: policy versions that an attempt may be behind.
    """

    def __init__(self, stage: Stage, max_staleness: int) -> None:
        self._stage = stage
        self._max_staleness = max_staleness
        self.version = -1
        """The newest published version; -1 unless `watch` runs."""

    async def watch(self) -> None:
        """Check every lease at each new version; runs forever."""
        async for version in watch_versions(self._stage.connection):
            self.version = version
            for lease in list(self._stage.leases.values()):
                self.cancel_if_stale(lease)

    def cancel_if_stale(self, lease: Lease) -> None:
        """Cancel one attempt if it is too old. Call it when work starts: a version may be newer than the claim."""
        if should_cancel(lease.claimed_version, self.version, self._max_staleness, len(lease.cancelled_attempts_s)):
            log.info(
                "attempt.cancelled", prompt=lease.prompt_id, claimed_version=lease.claimed_version, version=self.version
            )
            lease.cancel_stale()


log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRollout:
    """Rolls out the run's own prompts, at the newest policy version."""

    stage: Stage
    runner: GroupRunner
    in_flight: InFlightReporter
    stale_canceller: StaleCanceller
    with_greedy: bool
    """Each group gets one more episode, at temperature 0."""
    progress_writer: ProgressWriter | None
    """Saves finished completions and turns, so that another attempt can go on with them; None: nothing is saved."""

    async def work(self, lease: Lease, version: int) -> None:
        """Roll out one prompt, and complete its lease."""
        self.stale_canceller.cancel_if_stale(lease)
        claimed_at, prompt = time.time(), lease.prompt()
        writer = self.progress_writer
        journal = await TurnJournal.open(writer, lease) if writer is not None else None
        with self.in_flight.group(lease, prompt.environment) as progress:
            group = await self.runner.run(
                prompt,
                min_policy_version=max(0, version),
                with_greedy=self.with_greedy,
                progress=progress,
                journal=journal,
                owner=SandboxOwner(self.stage, lease),
            )
            if journal is not None:
                await journal.close()
            progress.activity = Activity.COMPLETE
            prometheus.count_group(group.completions)
            await self.stage.complete(
                lease, "groups", with_attempt(group, lease, worker=self.stage.consumer, claimed_at=claimed_at)
            )


async def rollout(context: WorkerContext) -> None:
    """Roll out prompts until the run has ended."""
    gc.set_threshold(10_000)  # with 64 completions in flight collections took a tenth of a worker's CPU time
    settings = context.settings
    if not settings.engine.urls:
        raise SettingsError("engine.urls is empty, and no --engine was given: a rollout worker needs an engine")
    discovery = await EngineDiscovery.look_up(settings.engine.urls)
    if truncating := settings.truncated_sampling:
        log.warning(
            "rollout.truncated_sampling", keys=truncating, effect="the ratio to the engine's log-probs is not 1"
        )
    factories = await anyio.to_thread.run_sync(load_factories, settings)
    _check_rewards(settings, factories)
    chats: Mapping[str | None, ChatSetup] | None = None
    async with cancel_on(context.stopping), open_model_folder(context) as folder:
        chats = await anyio.to_thread.run_sync(load_chat_setups, settings, folder, factories)
    if chats is None:  # stopped while it waited for the trainer
        return
    with_greedy = settings.estimator.name == "remax"
    concurrency = ConcurrencyLimit(settings.rollout.groups_in_flight)
    max_episodes = concurrency.limit * (settings.rollout.group_size + with_greedy)
    async with (
        EngineClient.from_settings(settings, discovery) as engines,
        open_group_runner(
            settings, factories, chats, engines, max_episodes=max_episodes, connection=context.connection
        ) as runner,
    ):
        is_ready = False
        async with cancel_on(context.stopping):
            await engines.wait_until_ready()
            is_ready = True
        if not is_ready:  # stopped while it waited for an engine
            return
        context.readiness.find_problem = lambda: "" if engines.healthy_count else "no engine answers"
        prometheus.engines_known.set_function(lambda: engines.known_count)
        prometheus.engines_healthy.set_function(lambda: engines.healthy_count)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_without_engine, context.stopping, engines, tasks.cancel_scope)
            await _work(context, runner, concurrency, with_greedy=with_greedy)
            tasks.cancel_scope.cancel()


async def _stop_without_engine(stopping: anyio.Event, engines: EngineClient, scope: anyio.CancelScope) -> None:
    """Give claimed prompts back at once when the worker drains and no engine answers that could finish them."""
    await stopping.wait()
    if not engines.healthy_count:
        scope.cancel()


async def _work(
    context: WorkerContext, runner: GroupRunner, concurrency: ConcurrencyLimit, *, with_greedy: bool
) -> None:
    """Work on the run's prompts, and on those of evaluations."""
    settings, stopping = context.settings, context.stopping
    stage = Stage(context.connection, "prompts", context.consumer, context.retry_policy, settings.capacity)
    stale_canceller = StaleCanceller(stage, settings.pacing.max_staleness)
    training = TrainingRollout(
        stage=stage,
        runner=runner,
        in_flight=InFlightReporter(stage),
        stale_canceller=stale_canceller,
        with_greedy=with_greedy,
        progress_writer=ProgressWriter(stage) if settings.rollout.resume else None,
    )
    reaper = _reaper(context, runner)
    async with open_evaluation(context, runner, concurrency) as evaluation, anyio.create_task_group() as background:
        background.start_soon(training.in_flight.run)
        if training.progress_writer is not None:
            background.start_soon(training.progress_writer.run)
        if reaper is not None:
            background.start_soon(reaper.run)
        if evaluation is not None:
            background.start_soon(evaluation.in_flight.run)
        if settings.pacing.stale_policy == "cancel":
            background.start_soon(stale_canceller.watch)
        async with anyio.create_task_group() as loops:
            loop = partial(work_loop, stopping=stopping, lock=SharedExclusiveLock(), describe=runner.describe)
            loops.start_soon(partial(loop, stage, training.work, concurrency=concurrency))
            if evaluation is not None:
                loops.start_soon(partial(loop, evaluation.stage, evaluation.work, concurrency=evaluation.concurrency))
        background.cancel_scope.cancel()
    if reaper is not None and not stopping.is_set():
        await reaper.finish()


def _reaper(context: WorkerContext, runner: GroupRunner) -> SandboxReaper | None:
    """Return what looks after the run's sandboxes where this worker's live; None if it opens none."""
    host = runner.sandboxes
    if host is None or host.place is None:
        return None
    return SandboxReaper(host, host.place, context.consumer, context.settings.queue.lease_s)


def _check_rewards(settings: Settings, factories: dict[str, EnvironmentFactory]) -> None:
    """Require a reward for every prompt."""
    if settings.rewards:
        return
    without_reward = [name for name, factory in factories.items() if not factory.has_reward]
    if without_reward:
        raise SettingsError(
            f"environment {without_reward[0]!r} has no get_reward and there are no [[rewards]]: nothing would measure "
            "a reward; add a reward function"
        )
