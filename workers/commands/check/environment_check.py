"""Play an episode in an environment without a model.

The episode uses the same environment slot as a rollout worker, so tool replies, observations and rewards are the same
as in a run. Tool arguments are samples generated from the schemas; if a tool refuses them, the report shows its error.
"""

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import anyio
import anyio.to_thread

from envs.call import CallRunner, Ok
from envs.factory import EnvironmentFactory
from envs.own_rows import first_row
from envs.references import class_key
from envs.rewards import environment_reward
from envs.rewards.env_reward import accepts_messages
from envs.rewards.merge import merge_parts
from envs.sandboxes.process import missing_sandbox
from stream.validity import Measured, RewardReason, Unmeasured
from workers.commands.check.check_report import LOAD_TIMEOUT_S, EnvironmentReport, failure_reason
from workers.commands.check.episode_check import EpisodeCheck, check_own_loop
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.tool_formats.parsed_turn import ToolCall
from workers.run.preflight.task_check import compare_tasks
from workers.settings import Rollout

_COMPARE_TIMEOUT_S = 30.0
_SAMPLED_STEPS = 100
_MUTABLE = (list, dict, set, bytearray, deque)


async def check_environment(
    ref: str,
    fields: dict[str, Any],
    limits: Rollout | None = None,
    args: Mapping[str, Any] = MappingProxyType({}),
    turns: Sequence[str | ToolCall] = (),
) -> EnvironmentReport:
    """Load an environment and play one episode in it.

    Args:
        ref: an entry point's name, `package.module:attr`, or `path/to/file.py:attr`.
        fields: fields of the prompt, for `reset`.
        limits: deadlines; default: the defaults of `[rollout]`.
        args: arguments of the factory.
        turns: texts and calls of the model, in order; default: one call of each tool with sample arguments.
    """
    limits = limits or Rollout()
    report = EnvironmentReport(ref=ref, fields=fields, args=dict(args))
    caller = CallRunner(anyio.CapacityLimiter(4))
    factory = await report.load(EnvironmentFactory.load, caller)
    if factory is None:
        return report
    report.reference_kind = factory.reference.kind
    report.environment = class_key(factory.environment_class)
    report.has_reward = factory.has_reward
    if not fields or factory.has_rows:
        found = await caller.call(first_row, {"factory": factory, "name": ref, "timeout_s": LOAD_TIMEOUT_S}, math.inf)
        if isinstance(found, Ok):
            report.fields = fields or {column: value for column, value in found.value.items() if column != "prompt"}
        elif fields:
            report.warnings.append(failure_reason(found))  # a run with a data file never calls rows()
        else:
            report.errors.append(failure_reason(found))
            return report
    if factory.runs_own_loop:
        was_reset = await check_own_loop(report, factory, limits, [turn for turn in turns if isinstance(turn, str)])
    else:
        slot = EnvironmentSlot(ref, factory, caller)
        try:
            was_reset = await EpisodeCheck(report, factory, slot, limits).run(turns)
        finally:
            await slot.close()
    if was_reset:
        await _compare_two_episodes(report, factory, caller, limits)
        report.warnings += await compare_tasks(factory, report.fields, 0, caller, limits.call_timeout_s)
    _inspect_reward(report)
    _inspect_class(report, factory)
    if warning := await anyio.to_thread.run_sync(missing_sandbox, factory.environment_class, args):
        report.warnings.append(warning)
    report.ok = not report.errors
    return report


async def _compare_two_episodes(
    report: EnvironmentReport, factory: EnvironmentFactory, caller: CallRunner, limits: Rollout
) -> None:
    """Start two more episodes and report state that their instances share, and what an episode without a step earns."""
    instances: list[Any] = []
    unseen: list[str] = []

    def start() -> None:
        instances.append(factory.make())

    for i in range(2):
        outcome = await caller.call(start, {}, limits.call_timeout_s)
        if isinstance(outcome, Ok):
            arguments = factory.reset_arguments(instances[i], report.fields, 0, i)
            unseen = [name for name in report.fields if name not in arguments]
            outcome = await caller.call(instances[i].reset, arguments, limits.call_timeout_s)
        if not isinstance(outcome, Ok):
            report.errors.append(
                f"a second environment could not be started beside the first: {failure_reason(outcome)}"
            )
            break
    else:
        report.warnings += [f"reset takes no {name!r}: only reward functions see that field" for name in unseen]
        found = await caller.call(_compare_instances, {"one": instances[0], "other": instances[1]}, _COMPARE_TIMEOUT_S)
        report.warnings += found.value if isinstance(found, Ok) else [f"__copy__: {failure_reason(found)}"]
        if factory.has_reward and factory.tools:
            await _compare_with_no_step(report, factory, instances[0], caller, limits)
    for instance in instances:
        if callable(close := getattr(instance, "close", None)):
            await caller.call(close, {}, limits.call_timeout_s)


async def _compare_with_no_step(
    report: EnvironmentReport, factory: EnvironmentFactory, started: Any, caller: CallRunner, limits: Rollout
) -> None:
    """Warn if an episode without a tool call earns more than one with tool calls."""
    parts = await environment_reward(started, limits.call_timeout_s, caller, [{"role": "assistant", "content": ""}])
    report.no_step_reward = idle = merge_parts(parts)
    seen = [report.reward.value] if isinstance(report.reward, Measured) else []
    if factory.declares_tools and callable(getattr(started, "sample_rewards", None)):
        sampled = await caller.call(started.sample_rewards, {"count": _SAMPLED_STEPS}, limits.call_timeout_s)
        report.sampled_rewards = sampled.value if isinstance(sampled, Ok) else []
    lowest = min([*seen, *report.sampled_rewards], default=0.0)
    if lowest >= 0 or (isinstance(idle, Measured) and idle.value <= lowest):
        return
    worth = f"earns {idle.value:g}" if isinstance(idle, Measured) else "is invalid"
    report.warnings.append(
        f"rewards may be negative ({lowest:g} seen), and an episode without a step {worth}, so not acting would pay: "
        "give such episodes a reward that is not higher (in get_reward; option no_step of the adapters)"
    )


def _compare_instances(one: object, other: object) -> Iterable[str]:
    warnings = []
    if hasattr(one, "__dict__") and hasattr(other, "__dict__"):
        shared = [n for n, v in vars(one).items() if isinstance(v, _MUTABLE) and vars(other).get(n) is v]
        warnings += [
            f"attribute {name} is the same object in two instances, so one episode's changes reach the other"
            for name in shared
        ]
    if hasattr(type(one), "__copy__") and copy.copy(one) is one:
        warnings.append("__copy__ returns the environment itself instead of a copy")
    return warnings


def _inspect_reward(report: EnvironmentReport) -> None:
    """Report a reward that was not measured; an error if no other episode would be measured either."""
    if not isinstance(report.reward, Unmeasured):
        return
    text = f"{report.reward.reason} {report.reward.detail}".rstrip()
    always_raises = all(
        isinstance(reward, Unmeasured) and reward.reason is RewardReason.RAISED
        for reward in (report.reward, report.no_step_reward)
    )
    reasons = {part.reward.reason for part in report.parts if isinstance(part.reward, Unmeasured)}
    if RewardReason.NOT_NUMERIC in reasons or always_raises:
        report.errors.append(f"get_reward measures nothing ({text}), so every completion would be invalid")
    else:
        report.warnings.append(f"get_reward measured nothing in this episode ({text}); such completions are invalid")


def _inspect_class(report: EnvironmentReport, factory: EnvironmentFactory) -> None:
    """Report problems that are visible without an episode."""
    cls = factory.environment_class
    own = [c for c in cls.__mro__ if c.__module__.partition(".")[0] == cls.__module__.partition(".")[0]]
    for home in own:
        for name, value in vars(home).items():
            if isinstance(value, _MUTABLE) and not name.startswith("__") and not name.isupper():
                report.warnings.append(
                    f"{home.__name__}.{name} is a {type(value).__name__} on the class, which all instances share; "
                    "make it in __init__ or reset"
                )
    report.warnings += [f"tool {tool.name}: {problem}" for tool in factory.tools for problem in tool.problems]
    if factory.tools and _returns_turn_rewards(report) and not accepts_messages(getattr(cls, "get_reward", None)):
        report.warnings.append(
            "get_reward returns a list but takes no messages, so it cannot know the number of turns: a turn may "
            "call several tools, or none; such completions are invalid"
        )
    if not factory.has_reward:
        report.warnings.append("it has no get_reward: a run needs a reward function under [[rewards]]")


def _returns_turn_rewards(report: EnvironmentReport) -> bool:
    """Return whether `get_reward` returned a list, even one of the wrong length."""
    return any(
        part.turn is not None or (isinstance(part.reward, Unmeasured) and part.reward.reason is RewardReason.SHAPE)
        for part in report.parts
    )
