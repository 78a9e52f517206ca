"""The step metrics that progress displays and plots show, with the names that trainers report them under."""

import math
from collections.abc import Mapping
from typing import Any, Literal

DisplayMetric = Literal["reward", "off_policy", "valid", "staleness", "staleness_max", "tokens_per_second"]

_NAMES: dict[DisplayMetric, tuple[str, ...]] = {
    "reward": ("reward/mean", "reward_mean"),
    "off_policy": ("correction/k3_kl",),
    "valid": ("valid_fraction",),
    "staleness": ("staleness/mean", "staleness_mean"),
    "staleness_max": ("staleness/max", "staleness_max"),
    "tokens_per_second": ("tokens_per_second",),
}


def metric_value(metrics: Mapping[str, Any], metric: DisplayMetric) -> float | None:
    """Return a metric of one step; None if it is missing or not finite."""
    return next((value for name in _NAMES[metric] if (value := finite_value(metrics, name)) is not None), None)


def finite_value(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return the metric of one step that a trainer reports under this name; None if it is missing or not finite."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
