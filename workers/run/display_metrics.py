"""Reads `metrics.jsonl`, and finds the metrics that displays and pictures show under the names that trainers use."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

Rows = list[dict[str, Any]]
"""The metrics of each step, in the order of the steps."""
DisplayMetric = Literal["reward", "off_policy", "valid", "staleness", "staleness_max", "tokens_per_second"]

_NAMES: dict[str, tuple[str, ...]] = {
    "reward": ("reward/mean", "reward_mean"),
    "off_policy": ("correction/k3_kl",),
    "valid": ("valid_fraction",),
    "staleness": ("staleness/mean", "staleness_mean"),
    "staleness_max": ("staleness/max", "staleness_max"),
    "tokens_per_second": ("tokens_per_second",),
}


def metric_value(metrics: Mapping[str, Any], metric: DisplayMetric | str) -> float | None:
    """Return a metric of one step, by its display name or its own; None if it is missing or not finite."""
    names = _NAMES.get(metric, (metric,))
    return next((value for name in names if (value := finite_value(metrics, name)) is not None), None)


def finite_value(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return the metric of one step that a trainer reports under this name; None if it is missing or not finite."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def read_metrics(file: Path) -> Rows:
    """Return the metrics of each step, in order. If a step was repeated after a crash, its last line counts."""
    if not file.exists():
        return []
    steps: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = msgspec.json.decode(text, type=dict[str, Any])
            step = int(row.get("step", number))
        except (ValueError, TypeError):
            continue  # incomplete line of a killed trainer, or damaged
        steps[step] = row | {"step": step}
    return [steps[step] for step in sorted(steps)]


def part_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the reward parts in the order in which they first appear."""
    prefix, suffix = "reward/part/", "/mean"
    found = (name for row in rows for name in row if name.startswith(prefix) and name.endswith(suffix))
    return list(dict.fromkeys(name.removeprefix(prefix).removesuffix(suffix) for name in found))
