"""A scorer: groups in, groups with rewards out.

It may turn a reward from measured to unmeasured, and may add one where none was asked for before; it never turns an
unmeasured one into 0.0.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import msgspec
import structlog

from envs.factory import Factory
from envs.merge import merge
from envs.rewards import RewardFunction, batch_of
from envs.snapshot import thaw
from stream.codec import decode
from stream.records import Group, Part
from stream.stage import Lease, Stage
from workers.process import Role
from workers.pump import pump

log = structlog.get_logger()


async def score(role: Role) -> None:
    """Score groups until the run has ended."""
    settings = role.settings
    factories = {name: await anyio.to_thread.run_sync(Factory.load, ref) for name, ref in settings.environments.items()}
    functions = [RewardFunction.load(r.ref, r.weight, r.where) for r in settings.rewards if r.where == "score"]
    stage = Stage(role.link, "groups", role.consumer, role.terms)

    async def work(lease: Lease, _version: int) -> None:
        group = decode(lease.payload, Group)
        await score_group(group, functions, factories, settings.rollout.reward_timeout_s)
        group.scored_at = time.time()
        await stage.settle(lease, "scored", group)

    await pump(stage, work, at_once=settings.score.groups_in_flight, stopping=role.stopping)


async def score_group(
    group: Group, functions: Sequence[RewardFunction], factories: Mapping[str, Factory], timeout_s: float
) -> None:
    """Fill in the parts and the merged reward of every completion that did not fail."""
    judged = [completion for completion in group.completions if completion.failure is None]
    if judged and functions:
        whole = msgspec.structs.replace(group, completions=judged)
        batch = batch_of(whole, await anyio.to_thread.run_sync(_environments, whole, factories))
        results: dict[int, list[Any]] = {}

        async def call(i: int, function: RewardFunction) -> None:
            results[i] = await function(batch, timeout_s)

        async with anyio.create_task_group() as calls:
            for i, function in enumerate(functions):
                calls.start_soon(call, i, function)
        for i, function in enumerate(functions):
            for completion, reward in zip(judged, results[i], strict=True):
                completion.parts.append(Part(name=function.name, reward=reward, weight=function.weight))
    for completion in judged:
        completion.reward = merge(completion.parts)


def _environments(group: Group, factories: Mapping[str, Factory]) -> list[object] | None:
    """One thawed snapshot per completion; None where the data has no environment."""
    factory = factories.get(group.prompt.environment or "")
    if factory is None:
        return None
    return [thaw(completion.snapshot or b"", factory) for completion in group.completions]
