"""A scorer: groups in, groups with rewards out.

It may turn a reward from measured to unmeasured, and may add one where none was asked for before; it never turns an
unmeasured one into 0.0.
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
from stream.queue.stage import Lease, Stage
from stream.records import Group
from workers.runtime.concurrency import ConcurrencyLimit
from workers.runtime.context import WorkerContext
from workers.runtime.reward_functions import add_reward_parts, load_factories, open_reward_functions
from workers.runtime.work_loop import work_loop
from workers.score.evaluation import evaluate_group


async def score(context: WorkerContext) -> None:
    """Score groups until the run has ended."""
    settings = context.settings
    factories = await anyio.to_thread.run_sync(partial(load_factories, settings, with_tools=False))
    stage = Stage(context.connection, "groups", context.consumer, context.retry_policy)
    held_out = Stage(context.connection, "eval:groups", context.consumer, context.retry_policy)

    async with open_reward_functions(settings, "score") as functions:

        async def work(lease: Lease, _version: int) -> None:
            group = lease.group()
            await score_group(group, functions, factories, settings.rollout.call_timeout_s)
            group.scored_at = time.time()
            await stage.complete(lease, "scored", group)

        async def evaluate(lease: Lease, _version: int) -> None:
            group = lease.group()
            if group.evaluated_version is None:
                raise RecordError("it does not say which policy version it evaluates")
            await score_group(group, functions, factories, settings.rollout.call_timeout_s)
            await held_out.record_evaluation(
                lease, msgspec.json.encode(evaluate_group(group, group.evaluated_version, settings))
            )

        room = ConcurrencyLimit(settings.rollout.groups_in_flight)
        async with anyio.create_task_group() as pumps:
            pumps.start_soon(partial(work_loop, stage, work, concurrency=room, stopping=context.stopping))
            if settings.eval.path:
                await create_evaluation_streams(context.connection)
                at_once = settings.evaluation_groups_in_flight(room.limit)
                share = ConcurrencyLimit(at_once, parent=room if at_once < room.limit else None)
                pumps.start_soon(partial(work_loop, held_out, evaluate, concurrency=share, stopping=context.stopping))


async def score_group(
    group: Group, functions: Sequence[RewardFunction], factories: Mapping[str, EnvironmentFactory], timeout_s: float
) -> None:
    """Fill in the parts and the merged reward of every completion that did not fail."""
    await add_reward_parts(group, functions, factories, timeout_s)
    for completion in group.completions:
        if completion.failure is None:
            completion.reward = merge_parts(completion.parts)
