"""Verdict on a run that ended normally: whether it can have learned anything, and what its completions were like."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from workers.runs.metrics_file import finite_value, metric_value
from workers.runs.progress import GroupTotals
from workers.settings import Settings

_BLOCK: Final = 5
"""Steps that are averaged at a run's beginning and end."""
_PART, _MEAN = "reward/part/", "/mean"
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


def describe_early_end(steps: int, dropped: int, settings: Settings) -> str:
    """Return that a finished run had too little data for `train.max_steps`; empty if it had enough, or names no number.

    Args:
        steps: optimizer steps of the run.
        dropped: groups that bore no step.
        settings: of the run.
    """
    wanted = settings.train.max_steps
    if steps >= wanted:
        return ""
    why = f", and {dropped} groups were dropped" if dropped else ""
    return (
        f"the data were used up after {steps} of train.max_steps = {wanted} steps{why}: more rows, or more "
        f"than data.epochs = {settings.data.epochs}, give more steps"
    )


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


def describe_rewards(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return how the mean reward and its parts moved from the first steps of a run to the last, in one line.

    Example: `reward of the first 5 steps 0.31, of the last 5 1.42; env.served 0.12 → 0.01, env.clean 0.19 → 1.41`.
    Empty with fewer than two steps, or without a measured reward.
    """
    block = min(_BLOCK, len(steps) // 2)
    first, last = steps[:block], steps[-block:]
    before = [value for step in first if (value := metric_value(step, "reward")) is not None]
    now = [value for step in last if (value := metric_value(step, "reward")) is not None]
    if not block or not before or not now:
        return ""
    shown_steps = (*first, *last)
    names = sorted({name for step in shown_steps for name in step if name.startswith(_PART) and name.endswith(_MEAN)})
    parts = []
    for name in names if len(names) > 1 else []:
        values = [[value for step in some if (value := finite_value(step, name)) is not None] for some in (first, last)]
        shown = " → ".join(f"{fmean(each):.3g}" if each else "none" for each in values)
        parts.append(f"{name.removeprefix(_PART).removesuffix(_MEAN)} {shown}")
    count = "step" if block == 1 else f"{block} steps"
    text = f"reward of the first {count} {fmean(before):.3g}, of the last {count} {fmean(now):.3g}"
    return "; ".join(filter(None, [text, ", ".join(parts)]))


def _range(low: float | None, high: float | None) -> str:
    return f"{low}" if low == high else f"from {low} to {high}"
