"""Compares instances of an environment that were reset with one row, as the completions of a group are.

An estimator compares the completions of a group: on different tasks, the luck of the draw is taken for skill. What
`reset` returns must be the same for all of them, and so must the attributes that it sets, unless they are noise.
"""

import copy
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import anyio
import msgspec

from envs.call import CallRunner, Ok, describe_failure
from envs.contract import Observation
from envs.factory import EnvironmentFactory
from envs.messages import messages_text
from envs.rewards.parts import merge_parts
from envs.snapshot.object_state import FrozenObject
from stream.records import Failure, Prompt
from stream.validity import Measured
from workers.check.report import EnvironmentTrial, Subject
from workers.check.user_code import reset_slot
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.sandboxes import LeasedSandboxes

MUTABLE: Final = (list, dict, set, bytearray, deque)
_COMPARE_TIMEOUT_S: Final = 30.0
_SAMPLED_STEPS: Final = 100
_SAME_SEED: Final = (0, 0, 0)
_INDICES: Final = (*_SAME_SEED, 1, 2)
"""Index of the completion at each pair of resets: a draw from few values may be the same once, but hardly each time."""
_ENOUGH_S: Final = 5.0
"""After this time no further pair is reset, so that the check of a slow environment takes as long as two resets."""
_MAX_BYTES: Final = 1_000_000
"""Size limit of the frozen attributes; what does not fit is not compared."""
_BEFORE, _SHOWN = 20, 60
"""Characters of an observation that are shown: before the first that differs, and in all."""
_REMEDY: Final = (
    "a group compares completions of one task, so draw the task from `seed`, which all of them share "
    "(docs/environments.md, Seeds)"
)


class InstanceComparison:
    """Resets two instances with one row, and compares them.

    Args:
        subject: the environment, in findings.
        factory: of the environment.
        prompt: the row.
        trial: what its episode gave.
        sandboxes: of an environment that opens some.
    """

    def __init__(
        self,
        subject: Subject,
        factory: EnvironmentFactory,
        prompt: Prompt,
        trial: EnvironmentTrial,
        sandboxes: LeasedSandboxes | None = None,
    ) -> None:
        self._subject, self._factory, self._prompt, self._trial = subject, factory, prompt, trial
        self._sandboxes = sandboxes
        self._caller = CallRunner(anyio.CapacityLimiter(4))
        self._slots = [EnvironmentSlot("a group's", factory, self._caller) for _ in range(2)]
        self._timeout_s = subject.checker.call_timeout_s

    async def run(self, *, with_state: bool, with_tasks: bool) -> None:
        """Report what the instances share, or what not acting earns, and different tasks in one group."""
        try:
            if with_state:
                await self._compare_state()
            if with_tasks:
                await self._compare_tasks()
        finally:
            for slot in self._slots:
                await slot.close()

    async def _compare_state(self) -> None:
        """Report state that two instances share, and what an episode without a step earns."""
        for index, slot in enumerate(self._slots):
            begun = await self._reset(slot, index)
            if isinstance(begun, Failure):
                detail = begun.detail.partition(": ")[2]
                self._subject.error(f"a second environment could not be started beside the first: {detail}")
                return
        one, other = (slot.instance for slot in self._slots)
        arguments = self._factory.reset_arguments(one, self._prompt.fields, 0, 0)
        for name in self._prompt.fields:
            if name not in arguments:
                self._subject.warn(f"reset takes no {name!r}: only reward functions see that field")
        outcome = await self._caller.call(_compare_attributes, {"one": one, "other": other}, _COMPARE_TIMEOUT_S)
        for problem in outcome.value if isinstance(outcome, Ok) else [f"__copy__: {describe_failure(outcome)}"]:
            self._subject.warn(problem)
        if self._factory.has_reward and self._factory.tools:
            await self._compare_with_no_step()

    async def _compare_with_no_step(self) -> None:
        """Warn if an episode without a tool call earns more than one with tool calls."""
        slot, trial = self._slots[0], self._trial
        trial.no_step_reward = idle = merge_parts(
            await slot.reward(self._timeout_s, [{"role": "assistant", "content": ""}])
        )
        sample = getattr(slot.instance, "sample_rewards", None)
        if self._factory.declares_tools and callable(sample):
            sampled = await self._caller.call(sample, {"count": _SAMPLED_STEPS}, self._timeout_s)
            trial.sampled_rewards = sampled.value if isinstance(sampled, Ok) else []
        played = [trial.reward.value] if isinstance(trial.reward, Measured) else []
        lowest = min([*played, *trial.sampled_rewards], default=0.0)
        if lowest >= 0 or (isinstance(idle, Measured) and idle.value <= lowest):
            return
        worth = f"earns {idle.value:g}" if isinstance(idle, Measured) else "is invalid"
        self._subject.warn(
            f"rewards may be negative ({lowest:g} seen); an episode without a step {worth}, so not acting would pay",
            "give such episodes a reward that is not higher (in get_reward; option no_step of the adapters)",
        )

    async def _compare_tasks(self) -> None:
        """Report that completions of one group would get different tasks; a reset that fails is reported elsewhere."""
        row = "" if self._subject.checker.is_alone else f" (with the row {self._prompt.id})"
        observations: list[Any] = []
        changed: dict[str, None] = {}
        started = time.monotonic()
        for index in _INDICES:
            pair = []
            for slot in self._slots:
                observation = await self._reset(slot, index)
                if isinstance(observation, Failure):
                    return
                other = next((seen for seen in observations if not _is_same(seen, observation)), observation)
                if other is not observation:
                    why = "with the same row and seeds" if index == 0 else "for completions of one group"
                    self._subject.warn(f"reset returned {_show_two(other, observation)} {why}{row}", _REMEDY)
                    return
                observations.append(observation)
                pair.append(await self._attributes(slot) if index in _SAME_SEED else {})
            one, two = pair
            changed |= dict.fromkeys(name for name in one if name in two and one[name] != two[name])
            if time.monotonic() - started > _ENOUGH_S:
                break
        if changed:
            self._subject.warn(
                f"reset with the same row and seeds left other values in {', '.join(changed)}{row}",
                f"if that is a part of the task, {_REMEDY}. A clock or an id does no harm",
            )

    async def _reset(self, slot: EnvironmentSlot, index: int) -> Observation | Failure:
        return await reset_slot(slot, self._sandboxes, self._prompt, index, self._timeout_s)

    async def _attributes(self, slot: EnvironmentSlot) -> Mapping[str, bytes]:
        """Return the attributes of an instance, encoded as in its snapshot."""
        frozen = await slot.freeze(_MAX_BYTES, self._timeout_s)
        if isinstance(frozen, Failure):
            return {}
        attributes = msgspec.msgpack.decode(frozen, type=FrozenObject).attributes
        return {name: bytes(value) for name, value in attributes.items()}


def _compare_attributes(one: object, other: object) -> list[str]:
    warnings = []
    if hasattr(one, "__dict__") and hasattr(other, "__dict__"):
        shared = [n for n, v in vars(one).items() if isinstance(v, MUTABLE) and vars(other).get(n) is v]
        warnings += [
            f"attribute {name} is the same object in two instances, so one episode's changes reach the other"
            for name in shared
        ]
    if hasattr(type(one), "__copy__") and copy.copy(one) is one:
        warnings.append("__copy__ returns the environment itself instead of a copy")
    return warnings


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays of several values
        return True


def _show_two(*observations: Any) -> str:
    """Return the texts of two observations from shortly before they differ."""
    texts = [" ".join((messages_text(each) if isinstance(each, list) else str(each)).split()) for each in observations]
    equal = next((i for i, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), 0)
    start = max(0, equal - _BEFORE)
    begin = ".. " if start else ""
    parts = [text[start : start + _SHOWN] + (" .." if len(text) > start + _SHOWN else "") for text in texts]
    return " and ".join(repr(begin + part) for part in parts)
