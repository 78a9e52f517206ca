"""Resets instances of an environment with one row, as the completions of a group do, and compares what they get.

An estimator compares the completions of a group: on different tasks, the luck of the draw is taken for skill. What
`reset` returns must be the same for all of them, and so must the attributes that it sets, unless they are noise.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from envs.call import CallRunner
from envs.contract import Observation
from envs.factory import EnvironmentFactory
from envs.messages import messages_text
from envs.snapshot.object_state import FrozenObject
from stream.records import Failure
from workers.rollout.environment_slot import EnvironmentSlot

_SAME_SEED: Final = (0, 0, 0)
_INDICES: Final = (*_SAME_SEED, 1, 2)
"""Index of the completion at each pair of resets: a draw from few values may be the same once, but hardly each time."""
_ENOUGH_S: Final = 5.0
"""After this time no further pair is reset, so that the check of a slow environment takes as long as two resets."""
_MAX_BYTES: Final = 1_000_000
"""Of the attributes that are compared."""
_BEFORE, _SHOWN = 20, 60
"""Characters of an observation that are shown: before the first that differs, and in all."""
_REMEDY: Final = (
    "a group compares completions of one task, so draw the task from `seed`, which all of them share "
    "(docs/environments.md, Seeds)"
)


class TaskDifference(Struct, frozen=True):
    """Why the completions of one group would get different tasks, and what to do about it."""

    message: str
    remedy: str


async def compare_tasks(
    factory: EnvironmentFactory, fields: dict[str, Any], seed: int, caller: CallRunner, timeout_s: float
) -> TaskDifference | None:
    """Return why the completions of one group would get different tasks; None if nothing speaks for it.

    A `reset` that fails is not reported: others try it, too.

    Args:
        factory: of the environment.
        fields: of the row.
        seed: of the group.
        caller: runs its methods.
        timeout_s: for making an instance, and for each reset.
    """
    slots = [EnvironmentSlot("a group's", factory, caller) for _ in range(2)]
    try:
        return await _compare(slots, fields, seed, timeout_s)
    finally:
        for slot in slots:
            await slot.close()


async def _compare(
    slots: list[EnvironmentSlot], fields: dict[str, Any], seed: int, timeout_s: float
) -> TaskDifference | None:
    observations: list[Any] = []
    changed: dict[str, None] = {}
    started = time.monotonic()
    for index in _INDICES:
        pair = []
        for slot in slots:
            observation: Observation | Failure = await slot.reset(dict(fields), seed, index, timeout_s)
            if isinstance(observation, Failure):
                return None
            other = next((seen for seen in observations if not _is_same(seen, observation)), observation)
            if other is not observation:
                why = "with the same row and seeds" if index == 0 else "for completions of one group"
                return TaskDifference(f"reset returned {_show_two(other, observation)} {why}", _REMEDY)
            observations.append(observation)
            pair.append(await _attributes(slot, timeout_s) if index in _SAME_SEED else {})
        one, two = pair
        changed |= dict.fromkeys(name for name in one if name in two and one[name] != two[name])
        if time.monotonic() - started > _ENOUGH_S:
            break
    if not changed:
        return None
    return TaskDifference(
        f"reset with the same row and seeds left other values in {', '.join(changed)}",
        f"if that is a part of the task, {_REMEDY}. A clock or an id does no harm",
    )


async def _attributes(slot: EnvironmentSlot, timeout_s: float) -> Mapping[str, bytes]:
    """Return the attributes of an instance, encoded as in its snapshot."""
    frozen = await slot.freeze(_MAX_BYTES, timeout_s)
    if isinstance(frozen, Failure):
        return {}
    found = msgspec.msgpack.decode(frozen, type=FrozenObject).attributes
    return {name: bytes(value) for name, value in found.items()}


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
