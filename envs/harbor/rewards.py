"""What a verifier wrote: `reward.json`, a number or an object of numbers, else `reward.txt`; and a task's reward."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from envs.harbor.task import VERIFIER_LOGS, Task
from envs.sandboxes.contract import Sandbox
from stream.validity import MAX_REWARD

REWARD_JSON: Final = f"{VERIFIER_LOGS}/reward.json"
REWARD_TEXT: Final = f"{VERIFIER_LOGS}/reward.txt"
REWARD: Final = "reward"
MAX_BYTES: Final = 1 << 20
MAX_KEYS: Final = 100


class NoRewardError(Exception):
    """A verifier wrote no reward, or one that cannot be read."""


async def read_rewards(sandbox: Sandbox) -> dict[str, float]:
    """Return the numbers that a verifier wrote; a single one has the key `reward`.

    Raises:
        NoRewardError: there are none; the message says why.
    """
    for path, parse in ((REWARD_JSON, _parse_json), (REWARD_TEXT, _parse_text)):
        try:
            return parse(await sandbox.read(path, MAX_BYTES))
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError) as error:
            raise NoRewardError(f"{path} cannot be read: {error}") from error
    raise NoRewardError(f"neither {REWARD_JSON} nor {REWARD_TEXT} was written")


async def reward_exists(sandbox: Sandbox) -> bool:
    """Return whether a reward is there: any file, link or folder of its name."""
    for path in (REWARD_JSON, REWARD_TEXT):
        try:
            await sandbox.read(path, 1)
        except FileNotFoundError:
            continue
        except ValueError:
            return True
        return True
    return False


def _parse_json(content: bytes) -> dict[str, float]:
    values = json.loads(content)
    if not isinstance(values, dict):
        values = {REWARD: values}
    if not values or len(values) > MAX_KEYS:
        raise ValueError(f"it has {len(values)} numbers; 1 to {MAX_KEYS} are read")
    return {str(key): _number(value) for key, value in values.items()}


def _parse_text(content: bytes) -> dict[str, float]:
    return {REWARD: _number(float(content))}


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:  # NaN is neither
        raise ValueError(f"{str(value)[:50]!r} is no finite number")
    return float(value)


def single_value(rewards: Mapping[str, float]) -> float:
    """Return one number for a verifier's: `reward`, else the sum of all."""
    return rewards[REWARD] if REWARD in rewards else sum(rewards.values())


def reaches(rewards: Mapping[str, float], minimum: Mapping[str, float]) -> bool:
    """Return whether rewards reach a step's `min_reward`; a missing key does not."""
    return all(rewards.get(key, -math.inf) >= least for key, least in minimum.items())


def task_parts(task: Task, rewards: Sequence[Mapping[str, float]]) -> float | dict[str, float]:
    """Return the reward of an episode, or its parts, whose sum is the reward.

    Args:
        task: that was played.
        rewards: of its steps, in order; those that were not played are missing, and count 0.
    """
    if len(task.steps) == 1:
        (only,) = rewards
        return only[REWARD] if REWARD in only else dict(only)
    if task.is_final:
        return single_value(rewards[-1]) if len(rewards) == len(task.steps) else 0.0
    values = [single_value(each) for each in rewards]
    values += [0.0] * (len(task.steps) - len(values))
    return {step.name: value / len(task.steps) for step, value in zip(task.steps, values, strict=True)}
