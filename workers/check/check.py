"""`check`: tries a settings file, an environment or a reward function, and returns a report."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec

from envs import factory as environments
from envs.call import CallRunner, Ok
from envs.references import resolve
from envs.rewards import loading
from stream.errors import PenstockError, ReferenceNotFoundError, RunMismatchError, SettingsError
from stream.records import Prompt
from stream.waiting import run_in_daemon_thread
from workers.check.chat import check_chats
from workers.check.datasets import check_data
from workers.check.environment import EnvironmentCheck, check_environments
from workers.check.machine import check_engines, check_machine, check_redis
from workers.check.model import check_model
from workers.check.report import Checker, CheckReport
from workers.check.rewards import check_rewards
from workers.check.scripted import Call
from workers.check.user_code import named_parameters, required_parameters
from workers.hub.names import MODEL_SECTION, known_values, print_note, try_to_resolve
from workers.role.log_setup import log_nothing
from workers.role.watchdogs import HangGuard, LoopWatchdog
from workers.rollout.tool_formats.parsing import ToolCall
from workers.settings import EnvironmentSettings, RewardSettings, Settings
from workers.settings.toml_file import load_settings, settings_for_model, write_overrides

_NO_MODEL: Final = Path("no-model")
_BLOCK_S: Final = 0.5
"""Code that keeps the event loop from running so long is named."""


def check(
    target: str | Path,
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
    args: Mapping[str, Any] = MappingProxyType({}),
    turns: Sequence[str | Call] = (),
    environment: str = "",
    overrides: Sequence[str] | Mapping[str, Any] = (),
    exits_on_hang: bool = False,
) -> CheckReport:
    """Try a settings file, an environment or a reward function, without a model and without starting anything.

    Blocks until everything was tried; user code runs in this process, each call with a deadline. The report says what
    was found; nothing is logged unless this process has set up structlog.

    Args:
        target: a settings file (`.toml`), or the reference of an environment or a reward function.
        fields: columns of the row, for `reset` and the reward function; default: the environment's own first row.
        args: arguments of the factory or the reward function.
        turns: texts and calls of the model in order; default: one call of each tool with sample arguments.
        environment: reference of an environment, for a reward function that reads environments.
        overrides: values of single settings: a mapping, or texts `a.b=c`.
        exits_on_hang: end this process if user code keeps the event loop from turning for `queue.hang_timeout_s`.

    Raises:
        SettingsError: a settings file, or an override, is wrong.

    Example:
        >>> check("counter.py:Counter", fields={"target": 3}).ok
        True
        >>> print(check("my.toml"))
    """
    words = write_overrides(overrides) if isinstance(overrides, Mapping) else tuple(overrides)
    if str(target).endswith(".toml"):
        if fields or args or turns or environment:
            raise SettingsError(f"{target} is a settings file, which names rows and arguments itself")
        settings = load_settings(Path(target), words)
        start = partial(_check_file, str(target), settings)
    else:
        settings = settings_for_model(_NO_MODEL, words)
        start = partial(_check_reference, str(target), settings, dict(args), dict(fields), turns, environment)
    with log_nothing():
        return run_in_daemon_thread(partial(_guard, start, settings.hang_timeout_s) if exits_on_hang else start)


async def _guard(start: partial[Any], hang_timeout_s: float) -> CheckReport:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(HangGuard(hang_timeout_s).watch)
        report: CheckReport = await start()
        tasks.cancel_scope.cancel()
    return report


async def _check_file(target: str, settings: Settings) -> CheckReport:
    """Test everything that a run needs before an engine starts."""
    settings, errors = await anyio.to_thread.run_sync(_resolve_hub_names, settings)
    checker = Checker(settings)
    for section, error in errors.items():
        checker.about(section, f"{section}.path").error(error)
    facts = None if MODEL_SECTION in errors else await anyio.to_thread.run_sync(check_model, checker)
    prompts = await anyio.to_thread.run_sync(check_data, checker, frozenset(errors))
    await anyio.to_thread.run_sync(check_machine, checker, facts)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(check_redis, checker)
        tasks.start_soon(check_engines, checker)
        made = await check_environments(checker, prompts)
        if facts is not None:
            await anyio.to_thread.run_sync(check_chats, checker, prompts, made, facts.max_positions)
        await check_rewards(checker, prompts, made)
    return checker.report(target, "settings file")


def _resolve_hub_names(settings: Settings) -> tuple[Settings, dict[str, PenstockError]]:
    """Download what the settings name on a hub, with the run's commits if it has begun."""
    try:
        known = known_values(settings)
    except RunMismatchError:  # the start reports it
        known = {}
    return try_to_resolve(settings, known, print_note)


async def _check_reference(
    ref: str,
    settings: Settings,
    args: dict[str, Any],
    fields: dict[str, Any],
    turns: Sequence[str | Call],
    environment: str,
) -> CheckReport:
    """Try an environment or a reward function alone."""
    timeout_s = Checker(settings, is_alone=True).load_timeout_s
    outcome = await CallRunner(anyio.CapacityLimiter(1)).call(is_reward_function, {"ref": ref, "args": args}, timeout_s)
    is_reward = isinstance(outcome, Ok) and outcome.value
    if is_reward:
        names: dict[str, str | EnvironmentSettings] = {environment: environment} if environment else {}
        rewards = (RewardSettings(ref, args=args),)
        settings = msgspec.structs.replace(settings, environments=names, rewards=rewards)
    else:
        settings = msgspec.structs.replace(settings, environments={ref: EnvironmentSettings(ref, args)})
    checker = Checker(settings, is_alone=True)
    blocks: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(LoopWatchdog(_BLOCK_S, lambda by, _: blocks.append(by)).watch)
        name = next(iter(settings.environments), None)
        prompt = Prompt(id="check:0:0", messages=[], fields=fields, environment=name)
        if is_reward:
            await check_rewards(checker, [prompt], await check_environments(checker, [prompt]))
        else:
            calls = [turn if isinstance(turn, str) else ToolCall(turn.name, turn.arguments, raw="") for turn in turns]
            checked = await EnvironmentCheck(checker, ref, prompt, calls).run()
            checker.environments |= {ref: checked.trial} if checked is not None else {}
        tasks.cancel_scope.cancel()
    for by in dict.fromkeys(blocks):
        place, _, name = by.rpartition(" ")
        checker.about(f"{'reward' if is_reward else 'environment'} {ref}", place).warn(
            f"{name} blocks the event loop: no deadline can end it, and a worker that it blocks renews no lease",
            "`await` in it, or write `def` instead of `async def`, which gets a thread",
        )
    return checker.report(ref, "reward function" if is_reward else "environment")


def is_reward_function(ref: str, args: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Return whether a reference names a reward function, not an environment factory. Imports the reference."""
    if ":" not in ref:
        names = [
            {entry.name for entry in entry_points(group=group)}
            for group in (environments.ENTRY_POINT_GROUP, loading.ENTRY_POINT_GROUP)
        ]
        return ref in names[1] - names[0]
    try:
        target: Any = resolve(ref, None).target
    except ReferenceNotFoundError:
        return False
    if isinstance(target, type):
        return not hasattr(target, "reset") and any("__call__" in vars(cls) for cls in target.__mro__[:-1])
    if not callable(target) or hasattr(target, "reset"):
        return False
    if loading.is_factory(target, args):  # a factory of environments has the same form
        return "Callable" in str(target.__annotations__.get("return", ""))
    takes_completions = not set(named_parameters(target)).isdisjoint(loading.CALL_PARAMETERS)
    return takes_completions or not set(required_parameters(target)) <= set(args)
