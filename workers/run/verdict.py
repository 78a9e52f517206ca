"""Verdict on a run that ended normally: whether it can have learned anything, and what its completions were like."""

from typing import Final

from workers.settings import Settings
from workers.train.progress import GroupTotals

_ADVICE: Final = (
    "Look at the completion below and at the reward function: equal rewards within a group have no advantage, whatever "
    "their value (docs/troubleshooting.md)"
)


def nothing_learned(totals: GroupTotals, trained: int, settings: Settings) -> str:
    """Return why a run cannot have learned anything; empty if it can have, or if `train.learning_rate` is 0.

    Args:
        totals: of the run.
        trained: number of groups that were trained.
        settings: of the run.
    """
    if not totals.groups or not settings.train.learning_rate:
        return ""
    outcome = "nothing was learned" if trained else "nothing was trained"
    if settings.estimator.within_group and totals.compared:
        if totals.tied == totals.compared:
            value = _range(totals.tied_min, totals.tied_max)
            return f"{totals.tied} of {totals.groups} groups had equal rewards ({value}); {outcome}. {_ADVICE}"
    elif totals.reward_count > 1 and totals.reward_min == totals.reward_max:
        return f"all {totals.reward_count} rewards were equal ({totals.reward_min}); {outcome}. {_ADVICE}"
    if not trained:
        return f"not one of {totals.groups} groups was trained; the reasons are above, under `dropped`"
    return ""


def describe_totals(totals: GroupTotals) -> str:
    """Return mean reward, and shares of tied groups, tool errors and truncations, in one line."""
    if not totals.completions:
        return ""
    mean = "no reward was measured" if totals.mean_reward is None else f"mean reward {totals.mean_reward:.3f}"
    attempts = max(totals.tool_calls, totals.tool_errors)  # a malformed call is an error, and no call
    calls = f"{attempts} tool calls" if attempts else "no tool was called"
    if totals.tool_errors:
        calls = f"{totals.tool_errors / attempts:.0%} of {calls} failed"
    return (
        f"{mean} over {totals.completions} completions; equal rewards in {totals.tied} of {totals.groups} groups; "
        f"{calls}; {totals.truncated / totals.completions:.0%} of completions were truncated"
    )


def _range(low: float | None, high: float | None) -> str:
    return f"{low}" if low == high else f"from {low} to {high}"
