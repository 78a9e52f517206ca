"""The few of a step's metrics that are shown to people, wherever they are shown."""

import math
from collections.abc import Mapping
from typing import Any, Literal

DisplayMetric = Literal["reward", "valid", "staleness", "staleness_max", "tokens_per_second"]

_NAMES: dict[DisplayMetric, tuple[str, ...]] = {
    # What the policy earns, groups that taught nothing included; the reward of those trained where that is not told.
    "reward": ("sampled/reward_mean", "reward/mean", "reward_mean"),
    "valid": ("valid_fraction",),
    "staleness": ("staleness/mean", "staleness_mean"),
    "staleness_max": ("staleness/max", "staleness_max"),
    "tokens_per_second": ("tokens_per_second",),
}


def metric_value(metrics: Mapping[str, Any], metric: DisplayMetric) -> float | None:
    """One number of a step; None where nothing was measured."""
    for name in _NAMES[metric]:
        value = metrics.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None
