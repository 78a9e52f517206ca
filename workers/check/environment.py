"""Tries an environment: makes it, plays an episode without a model, and compares instances.

The episode uses the same environment slot as a rollout worker, so tool replies, observations and rewards are the same
as in a run. One that is tried alone is played with its tools, whose arguments are samples generated from the schemas;
in the check of a run no tool is called, because a tool may change the world outside.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from msgspec import Struct

from envs.call import (
    call_subject,
    describe_subject,
)
from envs.factory import EnvironmentFactory, first_row
from envs.references import class_key
from envs.rewards.parts import accepts_messages
from envs.sandboxes.bubblewrap import missing_sandbox
from envs.sandboxes.contract import SandboxFailure
from stream.errors import PenstockError, SettingsError
from stream.records import Prompt, RewardPart
from stream.validity import RewardReason, Unmeasured
from workers.check.episode import EpisodeCheck
from workers.check.instances import MUTABLE, InstanceComparison
from workers.check.program import is_program, watched_arguments
from workers.check.report import Checker, EnvironmentTrial
from workers.check.user_code import load_user_code, missing_column, missing_reset_fields, sandboxes_if_needed
from workers.rollout.sandboxes import LeasedSandboxes
from workers.rollout.tool_formats.parsing import ToolCall


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
        prompt: a row of the data for it; None: it is not reset, unless it is tried alone and provides rows.
        turns: texts and calls of the model, in order, for one that is tried alone; default: one call of each tool.
    """

    def __init__(
        self, checker: Checker, name: str, prompt: Prompt | None, turns: Sequence[str | ToolCall] = ()
    ) -> None:
        self._checker, self._name, self._prompt, self._turns = checker, name, prompt, turns
        self._is_thorough = checker.is_alone and not checker.settings.rewards
        """The environment itself is tried, not a run with it or a reward function that reads it."""
        self._subject = checker.about(f"environment {name}", "" if checker.is_alone else f"environments.{name}")

    async def run(self) -> CheckedEnvironment | None:
        """Make the environment, and play it if there is a row. Returns None if it cannot be made."""
        given = self._checker.settings.environments[self._name]
        ref, args = (given, {}) if isinstance(given, str) else (given.ref, given.args)
        load = partial(EnvironmentFactory.load, ref, watched_arguments(ref, args))
        factory: EnvironmentFactory | None = await load_user_code(self._subject, load)
        if factory is None:
            return None
        trial = EnvironmentTrial(
            environment=class_key(factory.environment_class), reference_kind=factory.reference.kind
        )
        checked = CheckedEnvironment(factory=factory, prompt=self._prompt, trial=trial)
        if warning := await anyio.to_thread.run_sync(missing_sandbox, factory.environment_class, args):
            self._subject.warn(warning)
        if self._is_thorough and not await self._take_environment_row(checked):
            return checked
        if checked.prompt is not None:
            trial.fields = checked.prompt.fields
            await self._play(checked, checked.prompt)
        self._check_reward(trial)
        self._check_class(trial, factory)
        return checked

    async def _take_environment_row(self, checked: CheckedEnvironment) -> bool:
        """Take the first row of `rows()`, unless fields were given. Returns whether the environment can be reset."""
        fields = self._prompt.fields if self._prompt is not None else {}
        if not fields or checked.factory.has_rows:
            timeout_s = self._checker.load_timeout_s
            try:
                row = await anyio.to_thread.run_sync(first_row, checked.factory, self._name, timeout_s)
            except PenstockError as error:  # with fields it is a warning: a run with a data file never calls rows()
                self._subject.add("warning" if fields else "error", error, cause=error.cause)
                return bool(fields)
            fields = fields or {column: value for column, value in row.items() if column != "prompt"}
        checked.prompt = Prompt(id="check:0:0", messages=[], fields=fields, environment=self._name)
        return True

    async def _play(self, checked: CheckedEnvironment, prompt: Prompt) -> None:
        """Play one episode, and compare it with others."""
        factory, checker = checked.factory, self._checker
        call_subject.set(describe_subject(f"{self._subject.name}, prompt {prompt.id}"))
        if missing := missing_reset_fields(factory, prompt.fields):
            why, remedy = missing_column(checker, missing[0], prompt)
            self._subject.error(f"reset needs {missing[0]!r}{why}", remedy)
            return
        try:
            async with sandboxes_if_needed(factory, checker.settings.sandboxes) as sandboxes:
                await self._play_with(sandboxes, checked, prompt)
        except (SandboxFailure, SettingsError) as error:
            self._subject.error(f"no sandboxes: {error}")

    async def _play_with(self, sandboxes: LeasedSandboxes | None, checked: CheckedEnvironment, prompt: Prompt) -> None:
        """Play one episode, and compare it with others, given the sandboxes that the environment may open."""
        factory, trial, checker = checked.factory, checked.trial, self._checker
        episode = EpisodeCheck(self._subject, trial, factory, prompt, sandboxes)
        if factory.runs_own_loop and (self._is_thorough or is_program(factory)):
            was_reset = await episode.run_own_loop([turn for turn in self._turns if isinstance(turn, str)])
        else:
            was_reset = await episode.play(self._turns if self._is_thorough else None)
        checked.snapshot = episode.snapshot
        if not was_reset:
            return
        settings = checker.settings
        is_compared = settings.rollout.group_size > 1 and settings.estimator.compares_group
        await InstanceComparison(self._subject, factory, prompt, trial, sandboxes).run(
            with_state=self._is_thorough, with_tasks=is_compared and (self._is_thorough or not checker.is_alone)
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
                self._subject.error(message, remedy, part.reward.cause)
            else:
                episode = "this episode" if trial.tools or trial.turns else "an episode without a tool call"
                message = f"get_reward measured nothing in {episode} ({why}); such completions are invalid"
                self._subject.warn(message, cause=part.reward.cause)

    def _check_class(self, trial: EnvironmentTrial, factory: EnvironmentFactory) -> None:
        """Report problems that are visible without an episode."""
        cls, settings = factory.environment_class, self._checker.settings
        own = [c for c in cls.__mro__ if c.__module__.partition(".")[0] == cls.__module__.partition(".")[0]]
        for name, value, owner in ((n, v, home.__name__) for home in own for n, v in vars(home).items()):
            if isinstance(value, MUTABLE) and not name.startswith("__") and not name.isupper():
                kind = type(value).__name__
                message = f"{owner}.{name} is a {kind} on the class, which all instances share"
                self._subject.warn(message, "make it in __init__ or reset")
        for tool in factory.tools:
            for problem in tool.problems:
                self._subject.warn(f"tool {tool.name}: {problem}")
        returns_list = any(part.turn is not None or _has_wrong_shape(part) for part in trial.parts)
        if factory.tools and returns_list and not accepts_messages(getattr(cls, "get_reward", None)):
            self._subject.warn(
                "get_reward returns a list but takes no messages, so it cannot know the number of turns: a turn may "
                "call several tools, or none; such completions are invalid"
            )
        if factory.has_reward or settings.rewards:
            return
        if self._checker.is_alone:
            self._subject.warn("it has no get_reward: a run needs a reward function under [[rewards]]")
        else:
            message = "it has no get_reward and there are no [[rewards]], so nothing would measure a reward"
            self._subject.error(message, "add one of the two")


def _has_wrong_shape(part: RewardPart) -> bool:
    return isinstance(part.reward, Unmeasured) and part.reward.reason is RewardReason.SHAPE
