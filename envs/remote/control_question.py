"""Who is at fault when a judge or a reward model gives no score: the model's text, or the service?

A refusal looks the same either way. So the service is asked a control question: the same prompt, with a harmless
answer. If that gets a score, the service works and handles this prompt, so the model's text is the cause, and its
reward is the worst (`worst_reward`). If not, nobody knows what the model's answer is worth: it stays unmeasured. An
outage (`unavailable`) is never the model's fault, whatever a control question would say: it may just have ended.
"""

from collections.abc import Awaitable, Callable

from stream.validity import Measured, Reward, RewardReason, worst_reward

HARMLESS_ANSWER = "I do not know."
"""The answer in a control question."""


async def blame(reward: Reward, worst: float, control: Callable[[], Awaitable[Reward]]) -> Reward:
    """Return the reward of an answer, after a control question if it has none.

    Args:
        reward: what the service said.
        worst: the worst reward that it can give.
        control: asks for the reward of `HARMLESS_ANSWER` to the same prompt.
    """
    if isinstance(reward, Measured) or reward.reason is RewardReason.UNAVAILABLE:
        return reward
    if not isinstance(await control(), Measured):
        return reward
    return worst_reward(
        worst, reward.reason, f"{reward.detail}; the answer {HARMLESS_ANSWER!r} to the same prompt has a score"
    )
