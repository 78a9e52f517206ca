"""The lines of the charts, from `metrics.jsonl`: read once for all viewers, and again when the file changes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from workers.runs.folder import file_state
from workers.runs.phases import StepTimes, read_steps

DisplayMetric = Literal["reward", "off_policy", "valid", "staleness", "staleness_max", "tokens_per_second"]

_NAMES: dict[str, tuple[str, ...]] = {
    "reward": ("reward/mean", "reward_mean"),
    "off_policy": ("correction/k3_kl",),
    "valid": ("valid_fraction",),
    "staleness": ("staleness/mean", "staleness_mean"),
    "staleness_max": ("staleness/max", "staleness_max"),
    "tokens_per_second": ("tokens_per_second",),
}

MAX_POINTS: Final = 600
"""Points of a line; of longer runs each point is the mean over several steps."""
_MAX_REASONS: Final = 5
_MAX_PARTS: Final = 4

Rows = Sequence[dict[str, Any]]
Values = list[float | None]


class Line(Struct, frozen=True):
    """One line of a chart; None where a step has no value."""

    label: str
    values: Values

    @property
    def last(self) -> float | None:
        """The last value; None if no step has one."""
        return next((value for value in reversed(self.values) if value is not None), None)


class Chart(Struct, frozen=True, kw_only=True):
    """One chart over the steps of a run."""

    name: str
    title: str
    unit: str
    lines: list[Line]
    empty: str = ""
    """Why there is nothing to draw; empty: there is."""
    low: float | None = None
    """Lower end of the axis; None: as the values are."""


class MetricCharts(Struct, frozen=True, kw_only=True):
    """All charts of a run."""

    steps: list[float]
    """Step of each point; the last step of those that it is the mean of."""
    steps_per_point: int
    charts: list[Chart]


class MetricsFile:
    """The charts of one run's metrics. For threads.

    Args:
        file: `metrics.jsonl` of a run.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = Lock()
        self._state: str | None = None
        self._charts = MetricCharts(steps=[], steps_per_point=1, charts=[])
        self._times: dict[int, StepTimes] = {}

    def charts(self) -> MetricCharts:
        """Return the charts of all steps logged so far."""
        with self._lock:
            self._refresh()
            return self._charts

    def step_times(self) -> dict[int, StepTimes]:
        """Return when each step began and ended, by its number."""
        with self._lock:
            self._refresh()
            return self._times

    def _refresh(self) -> None:
        state = file_state(self._file)
        if state != self._state:
            rows = read_metrics(self._file)
            self._charts = make_charts(rows)
            self._times = read_steps(rows)
            self._state = state


def read_metrics(file: Path) -> list[dict[str, Any]]:
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


def metric_value(metrics: Mapping[str, Any], metric: DisplayMetric | str) -> float | None:
    """Return a metric of one step, by its display name or its own; None if it is missing or not finite."""
    names = _NAMES.get(metric, (metric,))
    return next((value for name in names if (value := finite_value(metrics, name)) is not None), None)


def finite_value(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return the metric of one step that a trainer reports under this name; None if it is missing or not finite."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def part_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the reward parts in the order in which they first appear."""
    prefix, suffix = "reward/part/", "/mean"
    found = (name for row in rows for name in row if name.startswith(prefix) and name.endswith(suffix))
    return list(dict.fromkeys(name.removeprefix(prefix).removesuffix(suffix) for name in found))


def make_charts(rows: Rows) -> MetricCharts:
    """Return the charts of these steps."""
    per_point = max(1, math.ceil(len(rows) / MAX_POINTS))
    groups = [rows[at : at + per_point] for at in range(0, len(rows), per_point)]

    def line(label: str, name: str) -> Line:
        return Line(label, [_mean([finite_value(row, name) for row in group]) for group in groups])

    def known(label: str, metric: DisplayMetric) -> Line:
        return Line(label, [_mean([metric_value(row, metric) for row in group]) for group in groups])

    parts = part_names(rows)
    reward = [known("reward", "reward"), line("held out", "eval/mean/valid")]
    reward += [line(name, f"reward/part/{name}/mean") for name in parts[:_MAX_PARTS]] if len(parts) > 1 else []
    charts = [
        _chart("reward", "Reward", "mean of a step", reward),
        _chart("valid", "Valid completions", "fraction", _validity(groups, known("valid", "valid")), low=0.0),
        _chart(
            "staleness",
            "Staleness",
            "policy versions",
            [known("mean", "staleness"), known("oldest token", "staleness_max")],
            low=0.0,
        ),
        _chart(
            "correction", "Correction: trainer to engine", "KL, nats per token", [known("k3", "off_policy")], low=0.0
        ),
        _chart(
            "throughput", "Throughput", "sampled tokens per second", [known("tokens/s", "tokens_per_second")], low=0.0
        ),
        _chart(
            "time",
            "Time of a step",
            "seconds",
            [line("whole step", "step_seconds"), line("training", "seconds"), line("rollout, mean", "attempt/seconds")],
            low=0.0,
        ),
    ]
    steps = [float(group[-1]["step"]) for group in groups]
    return MetricCharts(steps=steps, steps_per_point=per_point, charts=charts)


def _chart(name: str, title: str, unit: str, lines: list[Line], low: float | None = None) -> Chart:
    drawn = [line for line in lines if any(value is not None for value in line.values)]
    why = ""
    if not drawn:
        why = "no step yet: the first one adds a point" if not lines[0].values else "no step measured it"
    return Chart(name=name, title=title, unit=unit, lines=drawn, empty=why, low=low)


def _validity(groups: Sequence[Rows], valid: Line) -> list[Line]:
    """Return the valid fraction, and the share of each state that bears no loss, the most frequent ones first."""
    counts: dict[str, float] = {}
    for rows in groups:
        for row in rows:
            for name, count in row.items():
                if name.startswith("rows/") and name != "rows/valid" and isinstance(count, int | float):
                    counts[name] = counts.get(name, 0.0) + count
    names = [name for name in sorted(counts, key=lambda name: -counts[name]) if counts[name]][:_MAX_REASONS]
    return [valid, *(Line(name.removeprefix("rows/"), [_share(rows, name) for rows in groups]) for name in names)]


def _share(rows: Rows, name: str) -> float | None:
    total = sum(value for row in rows for key, value in row.items() if key.startswith("rows/") and _is_number(value))
    return sum(finite_value(row, name) or 0.0 for row in rows) / total if total else None


def _mean(values: Values) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
