"""What an environment measures itself, by its `get_reward`."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from anyio import CapacityLimiter

from envs.call import CallRunner, Ok
from envs.rewards.call_results import failure_reward, is_per_turn, read_values, rewards_by_name, to_reward
from stream.records import Message, RewardPart
from stream.validity import RewardReason, Unmeasured


async def environment_reward(
    env: object, timeout_s: float, runner: CallRunner | None = None, messages: Sequence[Message] = ()
) -> list[RewardPart]:
    """What the environment itself measured, by its `get_reward`.

    Args:
        env: the live environment, at the end of an episode.
        timeout_s: for the call.
        runner: bounds the threads; without one the call has its own.
        messages: what followed the prompt. Each of the assistant's is a turn of the model; a `get_reward` with a
            parameter of this name gets a copy.

    Returns:
        Nothing without a `get_reward`; one part `env` for a number or a failure; one part `env.KEY` for each entry of
        a mapping; for a list, tuple or array of one dimension one part `env` for each turn of the model, or a single
        unmeasured one (`shape`) where their numbers differ.
    """
    get_reward = getattr(env, "get_reward", None)
    if not callable(get_reward):
        return []
    arguments = {"messages": copy.deepcopy(list(messages))} if accepts_messages(get_reward) else {}
    outcome = await (runner or CallRunner(CapacityLimiter(1))).call(get_reward, arguments, timeout_s)
    if not isinstance(outcome, Ok):
        return [RewardPart(name="env", reward=failure_reward(outcome))]
    turns = sum(message.get("role") == "assistant" for message in messages)
    parts = _to_parts(outcome.value, turns)
    return parts or [RewardPart(name="env", reward=Unmeasured(RewardReason.MISSING, "get_reward returned no part"))]


def accepts_messages(get_reward: Any) -> bool:
    """Whether it names a parameter `messages`; `**kwargs` is none, since it may belong to a wrapper."""
    try:
        return "messages" in inspect.signature(get_reward).parameters
    except (TypeError, ValueError):  # no function, or written in C, without a signature
        return False


def _to_parts(value: Any, turns: int) -> list[RewardPart]:
    """What `get_reward` returned, after so many turns of the model."""
    if isinstance(value, Mapping):
        return [RewardPart(name=f"env.{key}", reward=reward) for key, reward in rewards_by_name(value).items()]
    if not is_per_turn(value):
        return [RewardPart(name="env", reward=to_reward(value))]
    values, wrong = read_values(value, turns, "one for each turn of the model")
    if wrong:
        return [RewardPart(name="env", reward=Unmeasured(RewardReason.SHAPE, wrong))]
    return [RewardPart(name="env", reward=to_reward(entry), turn=turn) for turn, entry in enumerate(values)]
