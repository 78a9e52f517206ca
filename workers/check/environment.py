"""Tries an environment: makes it, plays an episode without a model, and compares instances.

The episode uses the same environment slot as a rollout worker, so tool replies, observations and rewards are the same
as in a run. One that is tried alone is played with its tools, whose arguments are samples generated from the schemas;
in the check of a run no tool is called, because a tool may change the world outside.
"""

import copy
import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
from msgspec import Struct

from envs.call import (
    CallRunner,
    Failed,
    Ok,
    Outcome,
    call_subject,
    describe_failure,
    describe_subject,
)
from envs.factory import EnvironmentFactory
from envs.own_rows import first_row
from envs.references import class_key
from envs.rewards import environment_reward
from envs.rewards.env_reward import accepts_messages
from envs.rewards.merge import merge_parts
from envs.sandboxes.process import missing_sandbox
from stream.errors import PenstockError
from stream.records import Prompt, RewardPart
from stream.validity import Measured, RewardReason, Unmeasured
from workers.check.episode import EpisodeCheck
from workers.check.report import Checker, EnvironmentTrial
from workers.check.tasks import compare_tasks
from workers.check.user_code import load_user_code, missing_column, missing_reset_fields
from workers.rollout.tool_formats.parsed_turn import ToolCall

_COMPARE_TIMEOUT_S: Final = 30.0
_SAMPLED_STEPS: Final = 100
_MUTABLE: Final = (list, dict, set, bytearray, deque)


class CheckedEnvironment(Struct, kw_only=True):
    """An environment that was made, and what its first episode gave."""

    factory: Any
    trial: EnvironmentTrial
    prompt: Prompt | None = None
    """A row of the data for it."""
    snapshot: bytes | None = None
    """The environment at the end of its episode; None if it could not be reset or frozen."""


async def check_environments(checker: Checker, prompts: list[Prompt]) -> dict[str, CheckedEnvironment]:
    """Report faults of `[environments]`. Returns those that can be made, in the order of the settings."""
    made: dict[str, CheckedEnvironment] = {}

    async def check(name: str) -> None:
        prompt = next((each for each in prompts if each.environment == name), None)
        if checked := await EnvironmentCheck(checker, name, prompt).run():
            made[name] = checked

    async with anyio.create_task_group() as tasks:
        for name in checker.settings.environments:
            tasks.start_soon(check, name)
    checker.checked += [f"environment {name}" for name in made]
    checker.environments |= {name: made[name].trial for name in checker.settings.environments if name in made}
    return {name: made[name] for name in checker.settings.environments if name in made}


class EnvironmentCheck:
    """Tries one environment of `[environments]`.

    Args:
        checker: collects the findings.
        name: of the environment.
        prompt: a row of the data for it; None: it is not reset, unless it is tried alone and brings its own rows.
        turns: texts and calls of the model, in order, for one that is tried alone; default: one call of each tool.
    """

    def __init__(
        self, checker: Checker, name: str, prompt: Prompt | None, turns: Sequence[str | ToolCall] = ()
    ) -> None:
        self._checker, self._name, self._prompt, self._turns = checker, name, prompt, turns
        self._is_thorough = checker.is_alone and not checker.settings.rewards
        """The environment itself is tried, not a run with it or a reward function that reads it."""
        self._subject = (f"environment {name}", "" if checker.is_alone else f"environments.{name}")
        self._error, self._warn = partial(checker.error, *self._subject), partial(checker.warn, *self._subject)
        self._caller = CallRunner(anyio.CapacityLimiter(4))

    async def run(self) -> CheckedEnvironment | None:
        """Make the environment, and play it if there is a row. Returns None if it cannot be made."""
        given = self._checker.settings.environments[self._name]
        ref, args = (given, {}) if isinstance(given, str) else (given.ref, given.args)
        load = partial(EnvironmentFactory.load, ref, args)
        factory: EnvironmentFactory | None = await load_user_code(self._checker, load, *self._subject)
        if factory is None:
            return None
        trial = EnvironmentTrial(
            environment=class_key(factory.environment_class), reference_kind=factory.reference.kind
        )
        checked = CheckedEnvironment(factory=factory, prompt=self._prompt, trial=trial)
        if warning := await anyio.to_thread.run_sync(missing_sandbox, factory.environment_class, args):
            self._warn(warning)
        if self._is_thorough and not await self._take_own_row(checked):
            return checked
        if checked.prompt is not None:
            trial.fields = checked.prompt.fields
            await self._play(checked, checked.prompt)
        self._check_reward(trial)
        self._check_class(trial, factory)
        return checked

    async def _take_own_row(self, checked: CheckedEnvironment) -> bool:
        """Take the first row of `rows()`, unless fields were given. Returns whether the environment can be reset."""
        fields = self._prompt.fields if self._prompt is not None else {}
        if not fields or checked.factory.has_rows:
            timeout_s = self._checker.load_timeout_s
            arguments = {"factory": checked.factory, "name": self._name, "timeout_s": timeout_s}
            outcome = await self._caller.call(first_row, arguments, math.inf)
            if not isinstance(outcome, Ok):
                # A run with a data file never calls rows().
                (self._warn if fields else self._error)(_reason(outcome))
                return bool(fields)
            fields = fields or {column: value for column, value in outcome.value.items() if column != "prompt"}
        checked.prompt = Prompt(id="check:0:0", messages=[], fields=fields, environment=self._name)
        return True

    async def _play(self, checked: CheckedEnvironment, prompt: Prompt) -> None:
        """Play one episode, and compare it with others."""
        factory, trial, checker = checked.factory, checked.trial, self._checker
        call_subject.set(describe_subject(f"{self._subject[0]}, prompt {prompt.id}"))
        if missing := missing_reset_fields(factory, prompt.fields):
            why, remedy = missing_column(checker, missing[0], prompt)
            self._error(f"reset needs {missing[0]!r}{why}", remedy)
            return
        episode = EpisodeCheck(checker, self._subject, trial, factory)
        if factory.runs_own_loop and self._is_thorough:
            was_reset = await episode.run_own_loop(prompt, [turn for turn in self._turns if isinstance(turn, str)])
        else:
            was_reset = await episode.play(prompt, self._turns if self._is_thorough else None)
        checked.snapshot = episode.snapshot
        if not was_reset:
            return
        if self._is_thorough:
            await self._compare_two_episodes(trial, factory)
        settings = checker.settings
        is_compared = settings.rollout.group_size > 1 and settings.estimator.compares_group
        if is_compared and (self._is_thorough or not checker.is_alone):
            row = "" if checker.is_alone else f" (with the row {prompt.id})"
            tasks = compare_tasks(factory, prompt.fields, prompt.seed, self._caller, checker.call_timeout_s)
            if difference := await tasks:
                self._warn(f"{difference.message}{row}", difference.remedy)

    async def _compare_two_episodes(self, trial: EnvironmentTrial, factory: EnvironmentFactory) -> None:
        """Start two more episodes and report shared state, and what an episode without a step earns."""
        timeout_s = self._checker.call_timeout_s
        instances: list[Any] = []
        unseen: list[str] = []
        try:
            for i in range(2):
                outcome = await self._caller.call(factory.make, {}, timeout_s)
                if isinstance(outcome, Ok):
                    instances.append(outcome.value)
                    arguments = factory.reset_arguments(outcome.value, trial.fields, 0, i)
                    unseen = [name for name in trial.fields if name not in arguments]
                    outcome = await self._caller.call(outcome.value.reset, arguments, timeout_s)
                if not isinstance(outcome, Ok):
                    self._error(f"a second environment could not be started beside the first: {_reason(outcome)}")
                    return
            for name in unseen:
                self._warn(f"reset takes no {name!r}: only reward functions see that field")
            one, other = instances
            compared = await self._caller.call(_compare_instances, {"one": one, "other": other}, _COMPARE_TIMEOUT_S)
            for problem in compared.value if isinstance(compared, Ok) else [f"__copy__: {_reason(compared)}"]:
                self._warn(problem)
            if factory.has_reward and factory.tools:
                await self._compare_with_no_step(trial, factory, one)
        finally:
            for instance in instances:
                if callable(close := getattr(instance, "close", None)):
                    await self._caller.call(close, {}, timeout_s)

    async def _compare_with_no_step(self, trial: EnvironmentTrial, factory: EnvironmentFactory, started: Any) -> None:
        """Warn if an episode without a tool call earns more than one with tool calls."""
        timeout_s = self._checker.call_timeout_s
        parts = await environment_reward(started, timeout_s, self._caller, [{"role": "assistant", "content": ""}])
        trial.no_step_reward = idle = merge_parts(parts)
        values = [trial.reward.value] if isinstance(trial.reward, Measured) else []
        if factory.declares_tools and callable(getattr(started, "sample_rewards", None)):
            sampled = await self._caller.call(started.sample_rewards, {"count": _SAMPLED_STEPS}, timeout_s)
            trial.sampled_rewards = sampled.value if isinstance(sampled, Ok) else []
        lowest = min([*values, *trial.sampled_rewards], default=0.0)
        if lowest >= 0 or (isinstance(idle, Measured) and idle.value <= lowest):
            return
        worth = f"earns {idle.value:g}" if isinstance(idle, Measured) else "is invalid"
        self._warn(
            f"rewards may be negative ({lowest:g} seen); an episode without a step {worth}, so not acting would pay",
            "give such episodes a reward that is not higher (in get_reward; option no_step of the adapters)",
        )

    def _check_reward(self, trial: EnvironmentTrial) -> None:
        """Report a reward that was not measured; an error if no other episode would be measured either."""
        always_raises = all(
            isinstance(reward, Unmeasured) and reward.reason is RewardReason.RAISED
            for reward in (trial.reward, trial.no_step_reward)
        )
        for part in trial.parts:
            if not isinstance(part.reward, Unmeasured):
                continue
            why = f"{part.reward.reason} {part.reward.detail}".rstrip()
            is_text = part.reward.reason is RewardReason.NOT_NUMERIC  # whatever the model does
            if is_text or always_raises:
                message = f"get_reward measures nothing ({why}), so every completion would be invalid"
                remedy = "return a number, or a number for each part's name" if is_text else ""
                self._error(message, remedy, part.reward.cause)
            else:
                episode = "this episode" if trial.tools or trial.turns else "an episode without a tool call"
                message = f"get_reward measured nothing in {episode} ({why}); such completions are invalid"
                self._warn(message, cause=part.reward.cause)

    def _check_class(self, trial: EnvironmentTrial, factory: EnvironmentFactory) -> None:
        """Report problems that are visible without an episode."""
        cls, settings = factory.environment_class, self._checker.settings
        own = [c for c in cls.__mro__ if c.__module__.partition(".")[0] == cls.__module__.partition(".")[0]]
        for name, value, owner in ((n, v, home.__name__) for home in own for n, v in vars(home).items()):
            if isinstance(value, _MUTABLE) and not name.startswith("__") and not name.isupper():
                kind = type(value).__name__
                message = f"{owner}.{name} is a {kind} on the class, which all instances share"
                self._warn(message, "make it in __init__ or reset")
        for tool in factory.tools:
            for problem in tool.problems:
                self._warn(f"tool {tool.name}: {problem}")
        returns_list = any(part.turn is not None or _has_wrong_shape(part) for part in trial.parts)
        if factory.tools and returns_list and not accepts_messages(getattr(cls, "get_reward", None)):
            self._warn(
                "get_reward returns a list but takes no messages, so it cannot know the number of turns: a turn may "
                "call several tools, or none; such completions are invalid"
            )
        if factory.has_reward or settings.rewards:
            return
        if self._checker.is_alone:
            self._warn("it has no get_reward: a run needs a reward function under [[rewards]]")
        else:
            message = "it has no get_reward and there are no [[rewards]], so nothing would measure a reward"
            self._error(message, "add one of the two")


def _has_wrong_shape(part: RewardPart) -> bool:
    return isinstance(part.reward, Unmeasured) and part.reward.reason is RewardReason.SHAPE


def _compare_instances(one: object, other: object) -> list[str]:
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


def _reason(outcome: Outcome) -> str:
    """Return why a call failed: the message of a `PenstockError`, else a description of the error."""
    if isinstance(outcome, Failed) and isinstance(outcome.error, PenstockError):
        return str(outcome.error)
    return describe_failure(outcome)
