"""Environments and reward functions as the settings name them; a group's parts, one to each completion."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import msgspec

from envs.factory import EnvironmentFactory
from envs.rewards import RewardBatch, RewardFunction
from envs.rewards.call_results import RowResult
from envs.rewards.loading import CallOptions
from envs.snapshot import thaw
from stream.errors import RecordError
from stream.records import Completion, Group
from stream.validity import RewardReason, Unmeasured
from workers.settings import RewardSettings, Settings


def load_factories(settings: Settings, *, with_tools: bool = True) -> dict[str, EnvironmentFactory]:
    """A run's environments by name. Imports and constructs, and so may block.

    Without their tools, no server of theirs has to answer: enough to thaw snapshots.
    """
    return {
        name: EnvironmentFactory.load(world, with_tools=with_tools)
        if isinstance(world, str)
        else EnvironmentFactory.load(world.ref, world.args, with_tools=with_tools)
        for name, world in settings.environments.items()
    }


def load_reward_functions(settings: Settings, *where: str) -> list[RewardFunction]:
    """The reward functions of a run that are called there: `score`, `rollout`. Imports and constructs, may block."""
    return [load_reward_function(r) for r in settings.rewards if r.run_in in where]


def load_reward_function(settings: RewardSettings) -> RewardFunction:
    """One of `[[rewards]]`, called as it says. Imports and constructs, and so may block."""
    calling = CallOptions(
        settings.processes,
        settings.granularity,
        settings.timeout_s,
        settings.max_concurrency,
        settings.calls_per_second,
    )
    return RewardFunction.load(settings.ref, settings.weight, settings.run_in, settings.name, settings.args, calling)


@asynccontextmanager
async def open_reward_functions(settings: Settings, *where: str) -> AsyncIterator[list[RewardFunction]]:
    """`load_reward_functions`, each ready to be called."""
    functions = await anyio.to_thread.run_sync(partial(load_reward_functions, settings, *where))
    async with AsyncExitStack() as stack:
        for function in functions:
            await stack.enter_async_context(function.open())
        yield functions


async def add_reward_parts(
    group: Group, functions: Sequence[RewardFunction], factories: Mapping[str, EnvironmentFactory], timeout_s: float
) -> None:
    """Call every function on all completions that did not fail, and append what it measured to their parts.

    Each function sees environments thawed for it alone, so that none can change what another one reads. A completion
    whose snapshot cannot be read is unmeasured; the others are judged without it.

    Args:
        group: its completions gain parts, in the order of the functions.
        functions: with their weights.
        factories: environments by name.
        timeout_s: for each call of a function.
    """
    judged = [completion for completion in group.completions if completion.failure is None]
    if not judged or not functions:
        return
    factory = factories.get(group.prompt.environment or "")
    found: dict[int, list[RowResult]] = {}

    async def call(position: int, function: RewardFunction) -> None:
        found[position] = await _measure(group, judged, function, factory, timeout_s)

    async with anyio.create_task_group() as calls:
        for position, function in enumerate(functions):
            calls.start_soon(call, position, function)
    for position, function in enumerate(functions):
        for completion, entry in zip(judged, found[position], strict=True):
            completion.parts += function.to_parts(entry)


async def _measure(
    group: Group,
    judged: list[Completion],
    function: RewardFunction,
    factory: EnvironmentFactory | None,
    timeout_s: float,
) -> list[RowResult]:
    if factory is None:
        return await function(
            RewardBatch.from_group(msgspec.structs.replace(group, completions=judged), None), timeout_s
        )
    thawed = await anyio.to_thread.run_sync(_thaw_all, judged, factory)
    readable = [
        completion for completion, state in zip(judged, thawed, strict=True) if not isinstance(state, Unmeasured)
    ]
    states = [state for state in thawed if not isinstance(state, Unmeasured)]
    batch = RewardBatch.from_group(msgspec.structs.replace(group, completions=readable), states)
    rewards = iter(await function(batch, timeout_s) if readable else [])
    return [state if isinstance(state, Unmeasured) else next(rewards) for state in thawed]


def _thaw_all(completions: list[Completion], factory: EnvironmentFactory) -> list[object]:
    return [_thaw(completion, factory) for completion in completions]


def _thaw(completion: Completion, factory: EnvironmentFactory) -> object:
    try:
        return thaw(completion.snapshot or b"", factory)
    except RecordError as error:
        return Unmeasured(RewardReason.RAISED, f"the environment's snapshot cannot be read: {error}")
