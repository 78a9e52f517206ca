"""The parts of a completion's reward: those from the environment's own `get_reward`, and all of them as one reward."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from anyio import CapacityLimiter

from envs.call import Call, CallRunner, Ok, Outcome, call_signature
from envs.rewards.call_results import failure_reward, is_per_turn, read_values, rewards_by_name, to_reward
from stream.records import Message, RewardPart
from stream.validity import MAX_REWARD, Measured, Reward, RewardReason, Unmeasured


async def environment_reward(
    env: object, timeout_s: float, runner: CallRunner | None = None, messages: Sequence[Message] = ()
) -> list[RewardPart]:
    """Call an environment's `get_reward` and classify the result.

    Args:
        env: the live environment at the end of an episode.
        timeout_s: deadline of the call.
        runner: bounds the threads; without one the call has its own.
        messages: the conversation after the prompt. Each assistant message is one model turn. A `get_reward` with a
            parameter `messages` gets a copy.

    Returns:
        No part without a `get_reward`; one part `env` for a number or a failure; one part `env.KEY` for each entry of
        a mapping; one part `env` for each model turn for a list, tuple or 1-d array, or a single unmeasured part
        (`shape`) if its length is not the number of turns.
    """
    call = reward_call(env, messages)
    if call is None:
        return []
    return reward_parts(await (runner or CallRunner(CapacityLimiter(1))).call(*call, timeout_s), messages)


def reward_call(env: object, messages: Sequence[Message]) -> Call | None:
    """Return an environment's `get_reward` and its arguments; None without one."""
    get_reward = getattr(env, "get_reward", None)
    if not callable(get_reward):
        return None
    return get_reward, {"messages": copy.deepcopy(list(messages))} if accepts_messages(get_reward) else {}


def reward_parts(outcome: Outcome, messages: Sequence[Message]) -> list[RewardPart]:
    """Classify the outcome of `get_reward`, as described for `environment_reward`."""
    if not isinstance(outcome, Ok):
        return [RewardPart(name="env", reward=failure_reward(outcome))]
    turns = sum(message.get("role") == "assistant" for message in messages)
    parts = _to_parts(outcome.value, turns)
    return parts or [RewardPart(name="env", reward=Unmeasured(RewardReason.MISSING, "get_reward returned no part"))]


def accepts_messages(get_reward: Any) -> bool:
    """Return whether `get_reward` has a parameter `messages`; `**kwargs` does not count, it may be a wrapper's."""
    signature = call_signature(get_reward)
    return signature is not None and "messages" in signature.names


def _to_parts(value: Any, turns: int) -> list[RewardPart]:
    """Classify what `get_reward` returned after a number of model turns."""
    if isinstance(value, Mapping):
        by_name = rewards_by_name(value)
        if isinstance(by_name, Unmeasured):
            return [RewardPart(name="env", reward=by_name)]
        return [RewardPart(name=f"env.{key}", reward=reward) for key, reward in by_name.items()]
    if not is_per_turn(value):
        return [RewardPart(name="env", reward=to_reward(value))]
    values, wrong = read_values(value, turns, "one for each model turn")
    if wrong:
        return [RewardPart(name="env", reward=Unmeasured(RewardReason.SHAPE, wrong))]
    return [RewardPart(name="env", reward=to_reward(entry), turn=turn) for turn, entry in enumerate(values)]


def merge_parts(parts: Sequence[RewardPart]) -> Reward:
    """Return the weighted sum of the parts, or `Unmeasured` if any part is unmeasured.

    A part with weight 0 must be measured too. A weighted part, or a sum, beyond `MAX_REWARD` is unmeasured. The reasons
    of measured parts are kept.

    Example:
        >>> merge([Part(name="env", reward=Measured(1.0)), Part(name="short", reward=Measured(0.5), weight=0.2)])
        Measured(value=1.1)
    """
    if not parts:
        return Unmeasured(RewardReason.MISSING, "no reward was measured for this completion")
    unmeasured = [part for part in parts if isinstance(part.reward, Unmeasured)]
    if unmeasured:
        if len(parts) == 1:
            return parts[0].reward
        return Unmeasured(RewardReason.COMPONENT, "; ".join(_describe_part(part) for part in unmeasured))
    measured = [(part, part.reward) for part in parts if isinstance(part.reward, Measured)]
    weighted = [part.weight * reward.value for part, reward in measured]
    total = sum(weighted)
    if not math.isfinite(total):
        return Unmeasured(RewardReason.NOT_FINITE, "the weighted sum of the parts is not finite")
    largest = max(map(abs, [*weighted, total]))
    if largest > MAX_REWARD:
        return Unmeasured(
            RewardReason.TOO_LARGE, f"a weighted part, or their sum, is {largest:g}; the limit is {MAX_REWARD:g}"
        )
    explained = [(part, reward) for part, reward in measured if reward.reason is not None]
    detail = "; ".join(f"{part.name}: {reward.detail}" for part, reward in explained)
    return Measured(float(total), explained[0][1].reason if explained else None, detail)


def _describe_part(part: RewardPart) -> str:
    if not isinstance(part.reward, Unmeasured):
        return part.name
    turn = "" if part.turn is None else f" (turn {part.turn})"
    return f"{part.name}{turn}: {part.reward.reason} {part.reward.detail}".rstrip()
