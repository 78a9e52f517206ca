"""Roll out the prompts of evaluations, next to the run's own prompts."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from stream.errors import RecordError
from stream.queue.evaluation import create_evaluation_streams
from stream.queue.in_flight import Activity
from stream.queue.lease import Lease
from stream.queue.stage import Stage
from workers.role.concurrency import ConcurrencyLimit
from workers.role.context import WorkerContext
from workers.role.in_flight_reporter import InFlightReporter
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner, with_attempt


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
            group = await self.runner.run(prompt, min_policy_version=lease.evaluated_version, progress=progress)
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
