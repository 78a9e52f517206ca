"""The scorer process: groups in, groups with rewards out; of an evaluation's group, how many completions succeed.

An unmeasured reward stays unmeasured; it is never replaced by 0.0.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import anyio
import msgspec
from msgspec import structs

from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from envs.rewards.parts import merge_parts
from stream.codec import encode
from stream.errors import RecordError
from stream.queue.evaluation import PromptEvaluation, create_evaluation_streams
from stream.queue.in_flight import Activity
from stream.queue.lease import Lease
from stream.queue.stage import Stage
from stream.records import Completion, Group
from stream.validity import Unmeasured
from workers.role.concurrency import ConcurrencyLimit, SharedExclusiveLock
from workers.role.context import WorkerContext
from workers.role.in_flight_reporter import GroupProgress, InFlightReporter
from workers.role.prometheus import count_rewards
from workers.role.rewards import (
    add_reward_parts,
    describe_functions,
    load_factories,
    open_reward_functions,
)
from workers.role.work_loop import work_loop
from workers.settings import Settings


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
                loop = partial(work_loop, stopping=context.stopping, lock=SharedExclusiveLock(), describe=describe)
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


_MAX_BYTES: Final = 1_000_000
"""Largest group that is stored with an evaluation's results: the results of all prompts are in memory at once."""


def evaluate_group(group: Group, version: int, settings: Settings) -> PromptEvaluation:
    """Classify each completion of a scored group.

    Args:
        group: with its rewards.
        version: the evaluated policy version. Spans prove which version sampled each token; a completion with a token
        of
            another version counts as `mixed_versions`, whatever its reward.
        settings: of the run: the success threshold, and which truncated completions are invalid.
    """
    mixed, rewards, invalid = 0, list[float](), Counter[str]()
    for completion in group.completions:
        reward = completion.reward
        if any(span.version != version for row in completion.rows for span in row.spans):
            mixed += 1
        elif (state := _invalid_reason(completion, settings)) or reward is None or isinstance(reward, Unmeasured):
            invalid[state] += 1
        else:
            rewards.append(reward.value)
    return PromptEvaluation(
        environment=group.prompt.environment or "",
        valid=len(rewards),
        successes=sum(reward >= settings.algorithm.success_threshold for reward in rewards),
        reward_sum=math.fsum(rewards),
        invalid=dict(invalid),
        mixed_versions=mixed,
    )


def encode_transcript(group: Group) -> bytes:
    """Encode a group without final states of environments; empty if it is larger than an evaluation keeps."""
    completions = [structs.replace(completion, snapshot=None) for completion in group.completions]
    payload = encode(structs.replace(group, completions=completions))
    return payload if len(payload) <= _MAX_BYTES else b""


def _invalid_reason(completion: Completion, settings: Settings) -> str:
    """Return why the reward is unknown, as in the training metrics (`failed:engine`); empty if it is known."""
    reward, truncation = completion.reward, completion.truncated
    if completion.failure is not None:
        return f"failed:{completion.failure.reason}"
    if reward is None or isinstance(reward, Unmeasured):
        return f"reward:{reward.reason if reward else 'missing'}"
    if truncation is not None and settings.truncation_policy(truncation) == "exclude":
        return f"truncated:{truncation}"
    return ""
