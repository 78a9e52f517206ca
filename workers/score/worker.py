"""The scorer process: groups in, groups with rewards out.

An unmeasured reward stays unmeasured; it is never replaced by 0.0.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import anyio
import msgspec

from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from envs.rewards.merge import merge_parts
from stream.errors import RecordError
from stream.queue.evaluation import create_evaluation_streams
from stream.queue.in_flight import Activity
from stream.queue.lease import Lease
from stream.queue.stage import Stage
from stream.records import Group
from workers.runtime.concurrency import ConcurrencyLimit
from workers.runtime.context import WorkerContext
from workers.runtime.in_flight import GroupProgress, InFlightReporter
from workers.runtime.isolation import Isolation
from workers.runtime.metrics import count_rewards
from workers.runtime.reward_functions import (
    add_reward_parts,
    describe_functions,
    load_factories,
    open_reward_functions,
)
from workers.runtime.work_loop import work_loop
from workers.score.evaluation import encode_transcript, evaluate_group


async def score(context: WorkerContext) -> None:
    """Score groups until the run has ended."""
    settings = context.settings
    factories = await anyio.to_thread.run_sync(partial(load_factories, settings, with_tools=False))
    stage = Stage(context.connection, "groups", context.consumer, context.retry_policy)
    evaluation_stage = Stage(context.connection, "eval:groups", context.consumer, context.retry_policy)
    in_flight, evaluation_in_flight = InFlightReporter(stage), InFlightReporter(evaluation_stage)

    async with open_reward_functions(settings, "score") as functions:
        context.readiness.mark_ready()

        async def work(lease: Lease, _version: int) -> None:
            group = lease.group()
            group.score_claimed_at = time.time()
            with in_flight.group(lease, group.prompt.environment, len(group.completions)) as progress:
                await score_group(group, functions, factories, settings.rollout.call_timeout_s, progress)
                count_rewards(group.completions)
                group.scored_at = time.time()
                progress.activity = Activity.COMPLETE
                await stage.complete_scored(lease, group)

        async def evaluate(lease: Lease, _version: int) -> None:
            group = lease.group()
            if group.evaluated_version is None:
                raise RecordError("the group does not name the policy version that it evaluates")
            with evaluation_in_flight.group(lease, group.prompt.environment, len(group.completions)) as progress:
                await score_group(group, functions, factories, settings.rollout.call_timeout_s, progress)
            result = evaluate_group(group, group.evaluated_version, settings)
            result.group = b"" if settings.archive.keep == "none" else encode_transcript(group)
            await evaluation_stage.record_evaluation(lease, msgspec.json.encode(result))

        def describe(lease: Lease) -> str:
            return describe_functions(functions, lease.group().prompt.environment)

        limit = ConcurrencyLimit(settings.rollout.groups_in_flight)
        async with anyio.create_task_group() as background:
            background.start_soon(in_flight.run)
            background.start_soon(evaluation_in_flight.run)
            async with anyio.create_task_group() as loops:
                loop = partial(work_loop, stopping=context.stopping, isolation=Isolation(), describe=describe)
                loops.start_soon(partial(loop, stage, work, concurrency=limit))
                if settings.eval.source:
                    await create_evaluation_streams(context.connection)
                    share = settings.evaluation_groups_in_flight(limit.limit)
                    evaluation_limit = ConcurrencyLimit(share, parent=limit if share < limit.limit else None)
                    loops.start_soon(partial(loop, evaluation_stage, evaluate, concurrency=evaluation_limit))
            background.cancel_scope.cancel()


async def score_group(
    group: Group,
    functions: Sequence[RewardFunction],
    factories: Mapping[str, EnvironmentFactory],
    timeout_s: float,
    progress: GroupProgress | None = None,
) -> None:
    """Set the reward parts and the merged reward of every completion that did not fail."""
    await add_reward_parts(group, functions, factories, timeout_s, progress)
    for completion in group.completions:
        if completion.failure is None:
            completion.reward = merge_parts(completion.parts)
