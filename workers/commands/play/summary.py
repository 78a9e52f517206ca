"""Mean and spread of the rewards of a few episodes."""

import statistics
from collections import Counter

from msgspec import Struct

from stream.records import Group
from stream.validity import Measured, Unmeasured


class RewardSummary(Struct, frozen=True, kw_only=True):
    """Rewards and ends of one prompt's episodes."""

    episodes: int
    valid: int
    """Episodes with a measured reward; the figures below are over them."""
    mean: float | None
    std: float | None
    """Standard deviation of the population."""
    min: float | None
    max: float | None
    ends: dict[str, int]
    """Number of episodes by how they ended: `finished`, a limit, or why they are invalid."""
    mean_turns: float
    tool_calls: int
    tool_errors: int


def summarize_rewards(group: Group) -> RewardSummary:
    """Summarize the completions of a group."""
    rewards = [c.reward.value for c in group.completions if isinstance(c.reward, Measured)]
    ends = Counter[str]()
    for completion in group.completions:
        if completion.failure is not None:
            ends[f"invalid ({completion.failure.reason})"] += 1
        elif isinstance(completion.reward, Unmeasured):
            ends[f"invalid ({completion.reward.reason})"] += 1
        else:
            ends[str(completion.truncated or "finished")] += 1
    return RewardSummary(
        episodes=len(group.completions),
        valid=len(rewards),
        mean=statistics.fmean(rewards) if rewards else None,
        std=statistics.pstdev(rewards) if rewards else None,
        min=min(rewards, default=None),
        max=max(rewards, default=None),
        ends=dict(ends.most_common()),
        mean_turns=statistics.fmean(completion.turns for completion in group.completions),
        tool_calls=sum(completion.tool_calls for completion in group.completions),
        tool_errors=sum(completion.tool_errors for completion in group.completions),
    )


def describe_summary(summary: RewardSummary) -> str:
    """Return the summary as lines of text, and what equal rewards mean."""
    ends = ", ".join(f"{count} {end}" for end, count in summary.ends.items())
    calls = f"{summary.tool_calls} tool calls, {summary.tool_errors} tool errors"
    text = f"{summary.episodes} episodes: {ends}; {summary.mean_turns:.1f} turns on average, {calls}\n"
    if summary.mean is None:
        return f"{text}reward: none was measured; each episode above says why"
    spread = f"standard deviation {summary.std:.3f}, from {summary.min:g} to {summary.max:g}"
    text += f"reward: mean {summary.mean:.3f}, {spread}, over {summary.valid} of {summary.episodes} episodes"
    if summary.std == 0 and summary.valid > 1:
        text += "\nAll rewards are equal: a group like this one teaches a policy nothing."
    return text
