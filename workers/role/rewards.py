"""The environments and reward functions of the settings, and the calls that measure a group's reward parts."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import msgspec

from envs.call import call_subject, describe_subject, recorded_call
from envs.factory import EnvironmentFactory
from envs.rewards import RewardBatch, RewardFunction
from envs.rewards.call_results import CallResult, RowResult
from envs.rewards.loading import CallOptions
from envs.snapshot import TooLarge, thaw_and_watch
from stream.errors import RecordError
from stream.queue.in_flight import Activity
from stream.records import Completion, Group
from stream.validity import Reward, RewardReason, Unmeasured, worst_reward
from workers.role.in_flight_reporter import GroupProgress
from workers.settings import RewardSettings, Settings

_LONG_GROUP_BYTES = 400_000
"""Bytes of token ids, four for each token."""


def load_factories(settings: Settings, *, with_tools: bool = True) -> dict[str, EnvironmentFactory]:
    """Load a run's environments, by name. May block: imports modules and makes objects.

    `with_tools=False` is enough to restore snapshots, and needs no answer from the environments' servers.
    """
    factories = {}
    for name, given in settings.environments.items():
        ref, args = (given, {}) if isinstance(given, str) else (given.ref, given.args)
        with recorded_call(f"environment {name}, its module and constructor"):
            factories[name] = EnvironmentFactory.load(ref, args, with_tools=with_tools)
    return factories


def load_reward_functions(settings: Settings, *run_in: str) -> list[RewardFunction]:
    """Load the reward functions of a run that run in `score` or `rollout`. May block, as `load_factories`."""
    return [load_reward_function(r) for r in settings.rewards if r.run_in in run_in]


def load_reward_function(settings: RewardSettings) -> RewardFunction:
    """Load one of `[[rewards]]`. May block, as `load_factories`."""
    options = CallOptions(
        settings.processes,
        settings.granularity,
        settings.timeout_s,
        settings.max_concurrency,
        settings.calls_per_second,
        settings.environments,
        settings.none,
    )
    with recorded_call(f"reward function {settings.name or settings.ref}, its module and constructor"):
        return RewardFunction.load(
            settings.ref, settings.weight, settings.run_in, settings.name, settings.args, options
        )


@asynccontextmanager
async def open_reward_functions(settings: Settings, *run_in: str) -> AsyncIterator[list[RewardFunction]]:
    """Load reward functions and open them, ready to be called."""
    functions = await anyio.to_thread.run_sync(partial(load_reward_functions, settings, *run_in))
    async with AsyncExitStack() as stack:
        for function in functions:
            await stack.enter_async_context(function.open())
        yield functions


def describe_functions(functions: Sequence[RewardFunction], environment: str | None) -> str:
    """Return the names of the functions that measure an environment's completions: `reward function exact, style`."""
    names = [function.name for function in functions if function.applies_to(environment)]
    return f"reward function {', '.join(names)}" if names else ""


async def add_reward_parts(
    group: Group,
    functions: Sequence[RewardFunction],
    factories: Mapping[str, EnvironmentFactory],
    timeout_s: float,
    progress: GroupProgress | None = None,
) -> None:
    """Call every function on all completions that did not fail, and append the results to their reward parts.

    Each function gets its own restored environments, so that no function changes what another one reads. A
    completion whose snapshot cannot be read is unmeasured; the other completions are measured without it.

    Args:
        group: parts are appended to its completions, in the order of the functions, and what the functions logged.
        functions: with their weights; those that do not measure the group's environment are not called.
        factories: environments by name.
        timeout_s: for each call of a function.
        progress: where to note which functions are running.
    """
    completions = [completion for completion in group.completions if completion.failure is None]
    functions = [function for function in functions if function.applies_to(group.prompt.environment)]
    if not completions or not functions:
        return
    factory = factories.get(group.prompt.environment or "")
    found: dict[int, CallResult] = {}
    pending = list(functions)
    progress = progress or GroupProgress()
    progress.activity, progress.pending = Activity.REWARD, pending

    async def call(position: int, function: RewardFunction) -> None:
        call_subject.set(describe_subject(f"reward function {function.name}, prompt {group.prompt.id}"))
        found[position] = await measure_completions(group, completions, function, factory, timeout_s)
        pending.remove(function)

    async with anyio.create_task_group() as calls:
        for position, function in enumerate(functions):
            calls.start_soon(call, position, function)
    for position, function in enumerate(functions):
        result = found[position]
        for i, completion in enumerate(completions):
            completion.parts += function.to_parts(result.rows[i])
            completion.extra = completion.extra | {column: values[i] for column, values in result.extra.items()}
        for name, values in result.metrics.items():
            group.logged_metrics = group.logged_metrics | {name: [*group.logged_metrics.get(name, ()), *values]}


async def measure_completions(
    group: Group,
    completions: list[Completion],
    function: RewardFunction,
    factory: EnvironmentFactory | None,
    timeout_s: float,
) -> CallResult:
    """Call one function on completions, with environments restored from their snapshots if there is a factory.

    Completions on which the function fails because their snapshot was too large are set aside, with its worst value; a
    call that failed for their siblings too is repeated without them.
    """
    if factory is None:
        return await function.measure(await _build_batch(group, completions, None), timeout_s)
    left, apart = list(range(len(completions))), dict[int, RowResult]()
    while True:
        thawed = await anyio.to_thread.run_sync(_thaw_all, [completions[i] for i in left], factory)
        apart |= {i: state for i, state in zip(left, thawed, strict=True) if isinstance(state, Unmeasured)}
        readable = {i: state for i, state in zip(left, thawed, strict=True) if not isinstance(state, Unmeasured)}
        left = list(readable)
        batch = await _build_batch(group, [completions[i] for i in left], [env for env, _ in readable.values()])
        result = await function.measure(batch, timeout_s)
        too_large = _too_large([limits for _, limits in readable.values()], result.rows, function)
        apart |= {left[place]: reward for place, reward in too_large.items()}
        siblings_failed = any(_is_raised(row) and place not in too_large for place, row in enumerate(result.rows))
        if not (too_large and siblings_failed):
            break
        left = [i for i in left if i not in apart]
    places = {row: place for place, row in enumerate(left)}
    rows = [apart[row] if row in apart else result.rows[places[row]] for row in range(len(completions))]
    extra = {
        column: [values[places[row]] if row in places else None for row in range(len(completions))]
        for column, values in result.extra.items()
    }
    return CallResult(rows, result.metrics, extra)


def _too_large(snapshots: Sequence[TooLarge], rows: Sequence[RowResult], function: RewardFunction) -> dict[int, Reward]:
    """Return the rewards of failed completions whose snapshot lacks, for its size, what the function tried to read."""
    failed = [place for place, row in enumerate(rows) if _is_raised(row)]
    read = set[str]().union(*(snapshots[place].read for place in failed))
    return {
        place: worst_reward(
            function.call_options.worst_value,
            RewardReason.RAISED,
            f"{function.name} reads {', '.join(sorted(names))}, which exceeds rollout.max_snapshot_bytes; raise it"
            + (
                ""
                if function.call_options.worst_value is not None
                else ", or give the function call_options = CallOptions(worst_value=...)"
            ),
        )
        for place in failed
        if (names := read & snapshots[place].omitted)
    }


def _is_raised(row: RowResult) -> bool:
    return isinstance(row, Unmeasured) and row.reason is RewardReason.RAISED


async def _build_batch(group: Group, completions: list[Completion], environments: list[object] | None) -> RewardBatch:
    """Build a function's arguments; in a thread if the group is long, so that leases are renewed meanwhile."""
    measured = msgspec.structs.replace(group, completions=completions)
    build = partial(RewardBatch.from_group, measured, environments)
    size = sum(len(row.token_ids) for completion in completions for row in completion.rows)
    return build() if size < _LONG_GROUP_BYTES else await anyio.to_thread.run_sync(build)


def _thaw_all(completions: list[Completion], factory: EnvironmentFactory) -> list[tuple[object, TooLarge] | Unmeasured]:
    return [_thaw(completion, factory) for completion in completions]


def _thaw(completion: Completion, factory: EnvironmentFactory) -> tuple[object, TooLarge] | Unmeasured:
    try:
        return thaw_and_watch(completion.snapshot or b"", factory)
    except RecordError as error:
        return Unmeasured(RewardReason.RAISED, f"the environment's snapshot cannot be read: {error}")
