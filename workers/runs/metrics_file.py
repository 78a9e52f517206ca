"""The charts of a run, from `metrics.jsonl` and `eval.jsonl`: one list for the browser and for `progress.png`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, structs

from workers.runs.evaluations import FILE as EVALUATIONS
from workers.runs.evaluations import EvaluationResult, read_evaluations
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

_REASONS: Final = ("invalid_share/", "truncated_share/", "groups/dropped/")
"""A step that counts completions and does not name one of these had none."""
_NO_REASONS: Final = ("rows/valid", "truncated/reward_mean", "truncated/length_mean")

MAX_POINTS: Final = 600
"""Points of a line; of longer runs each point is the mean over several steps."""
MAX_LINES: Final = 6
"""Lines of a chart; of more the largest are drawn."""

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
    group: str
    """Heading below which it stands."""
    title: str
    unit: str
    lines: list[Line]
    """Those that have a value."""
    omitted: int = 0
    """Lines that have one too and are not drawn."""
    low: float | None = 0.0
    """Lower end of the axis; None: as the values are."""


class MetricCharts(Struct, frozen=True, kw_only=True):
    """All charts of a run that have something to draw."""

    steps: list[float]
    """Step of each point; the last step of those that it is the mean of."""
    steps_per_point: int
    charts: list[Chart]

    @property
    def groups(self) -> dict[str, list[Chart]]:
        """The charts by their headings, in order."""
        return {name: [chart for chart in self.charts if chart.group == name] for name in _GROUPS}


class _Plan(Struct, frozen=True):
    """What a chart draws: metrics by the labels of their lines.

    A `*` in a metric stands for every name that occurs, which is then the label.
    """

    name: str
    title: str
    unit: str
    lines: dict[str, str]
    low: float | None = 0.0


_GROUPS: Final[dict[str, tuple[_Plan, ...]]] = {
    "Reward": (
        _Plan("reward", "Reward", "mean of a step", {"training": "reward", "held out": "held_out/mean"}, None),
        _Plan("parts", "Reward parts", "mean, before weights", {"*": "reward/part/*/mean"}, None),
        _Plan("spread", "Reward spread", "standard deviation", {"": "reward/std"}),
        _Plan("pass", "Success", "one of K in training", {"pass@*": "pass@*/valid"}),
        _Plan("held_out", "Held-out success", "one of K", {"pass@*": "held_out/pass@*"}),
        _Plan("unjudged", "Not judged", "completions", {"*": "reward/unjudged/*"}),
        _Plan("logged", "Logged by rewards", "mean", {"*": "logged/*"}, None),
    ),
    "Optimizer": (
        _Plan("loss", "Loss", "per loss token", {"": "loss"}, None),
        _Plan("gradient", "Gradient norm", "before clipping", {"": "grad_norm"}),
        _Plan("entropy", "Entropy", "nats per token", {"": "entropy"}),
        _Plan("clipped", "Clipped tokens", "fraction", {"all": "clip_fraction", "lower": "clip_fraction_lower"}),
        _Plan("rate", "Learning rate", "", {"": "learning_rate"}),
        _Plan("value", "Critic", "reward", {"value": "value/mean", "error": "value/error"}, None),
    ),
    "Completions": (
        _Plan("length", "Completion length", "sampled tokens", {"mean": "length/mean", "longest": "length/max"}),
        _Plan("ends", "Length by end", "sampled tokens", {"*": "length/by_end/*"}),
        _Plan("turns", "Turns", "per completion", {"": "turns/mean"}),
        _Plan("truncated", "Truncation", "share by reason", {"*": "truncated_share/*"}),
        _Plan("tools", "Tool errors", "share of calls", {"": "tool_error_share"}),
        _Plan("valid", "Validity", "share by reason", {"valid": "valid", "*": "invalid_share/*"}),
        _Plan("dropped", "Dropped by reason", "groups", {"*": "groups/dropped/*"}),
    ),
    "Off-policy": (
        _Plan("staleness", "Staleness", "policy versions", {"mean": "staleness", "oldest token": "staleness_max"}),
        _Plan(
            "kl",
            "KL divergence",
            "nats per token",
            {"to engine": "off_policy", "in batch": "kl/k3", "to reference": "reference/kl"},
        ),
        _Plan(
            "weights",
            "Importance weights",
            "ratio",
            {"mean": "correction/rollout_is_mean", "largest": "correction/rollout_is_max"},
        ),
        _Plan("ratio", "Policy ratio", "to proximal", {"mean": "ratio/mean", "largest": "ratio/max"}),
        _Plan("rejected", "Rejected tokens", "fraction", {"": "correction/rollout_rs_masked_fraction"}),
        _Plan("cancelled", "Cancelled attempts", "of a step", {"": "attempt/cancelled"}),
    ),
    "Speed": (
        _Plan("throughput", "Throughput", "tokens per second", {"": "tokens_per_second"}),
        _Plan("forwarded", "Tokens of a pass", "tokens", {"forwarded": "tokens/forwarded", "shared": "tokens/shared"}),
        _Plan(
            "time",
            "Time of a step",
            "seconds",
            {
                "whole": "step_seconds",
                "training": "seconds",
                "waiting for groups": "waiting_seconds",
                "rollout, mean": "attempt/seconds",
                "publication": "publish/seconds",
            },
        ),
    ),
}


class MetricsFile:
    """The charts of one run, read once for all viewers, and again when its files change. For threads.

    Args:
        file: `metrics.jsonl` of a run; `eval.jsonl` is beside it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._evaluations = file.with_name(EVALUATIONS)
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
        state = f"{file_state(self._file)} {file_state(self._evaluations)}"
        if state != self._state:
            rows = read_metrics(self._file)
            self._charts = make_charts(rows, read_evaluations(self._file.parent))
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


def make_charts(rows: Rows, evaluations: Sequence[EvaluationResult] = (), max_points: int = MAX_POINTS) -> MetricCharts:
    """Return the charts that have a value.

    Args:
        rows: the metrics of each step.
        evaluations: each is drawn at the step whose weights were measured.
        max_points: points of a line; with more steps each is the mean over several.
    """
    rows = [row | _shares(row) for row in rows]
    nothing = {name: 0.0 for row in rows for name in row if name.startswith(_REASONS)}
    counted = [any(name.startswith("rows/") for name in row) for row in rows]
    steps = {row["step"]: nothing | row if has else row for row, has in zip(rows, counted, strict=True)}
    for each in evaluations:
        steps[each.step] = steps.get(each.step, {"step": each.step}) | _scores(each)
    rows = [steps[step] for step in sorted(steps)]
    per_point = max(1, math.ceil(len(rows) / max_points))
    points = [rows[at : at + per_point] for at in range(0, len(rows), per_point)]
    charts = []
    for group, plans in _GROUPS.items():
        for plan in plans:
            found = [Line(label, [_mean(metric, rows) for rows in points]) for label, metric in _expand(plan, rows)]
            lines = [line for line in found if line.last is not None]
            largest = sorted(lines, key=lambda line: -sum(abs(value or 0.0) for value in line.values))[:MAX_LINES]
            if lines and not (plan.name == "parts" and len(lines) == 1):  # a single part is the reward
                charts.append(
                    Chart(
                        name=plan.name,
                        group=group,
                        title=plan.title,
                        unit=plan.unit,
                        lines=[line for line in lines if line in largest],
                        omitted=len(lines) - len(largest),
                        low=plan.low,
                    )
                )
    return MetricCharts(steps=[float(rows[-1]["step"]) for rows in points], steps_per_point=per_point, charts=charts)


def overlay(runs: Mapping[str, MetricCharts]) -> MetricCharts:
    """Return charts with a line for each of several runs, by their names; a chart for each line that one run has."""
    steps = sorted({step for charts in runs.values() for step in charts.steps})
    found: dict[tuple[str, str], list[Line]] = {}
    plans: dict[tuple[str, str], Chart] = {}
    for run, charts in runs.items():
        for chart in charts.charts:
            for line in chart.lines:
                values = dict(zip(charts.steps, line.values, strict=True))
                found.setdefault((chart.name, line.label), []).append(Line(run, [values.get(step) for step in steps]))
                plans.setdefault((chart.name, line.label), chart)
    drawn = [
        structs.replace(
            plans[key],
            name=f"{key[0]}-{number}",
            title=f"{plans[key].title}: {key[1]}" if key[1] else plans[key].title,
            lines=lines,
            omitted=0,
        )
        for number, (key, lines) in enumerate(found.items())
    ]
    per_point = max((charts.steps_per_point for charts in runs.values()), default=1)
    return MetricCharts(steps=steps, steps_per_point=per_point, charts=drawn)


def _expand(plan: _Plan, rows: Rows) -> Iterator[tuple[str, str]]:
    """Yield label and metric of each line; names that a `*` stands for come in the order in which they first occur."""
    for label, metric in plan.lines.items():
        prefix, star, suffix = metric.partition("*")
        names = dict.fromkeys(name for row in rows for name in row if name.startswith(prefix)) if star else {}
        for name in names:
            if name.endswith(suffix) and len(name) > len(prefix) + len(suffix):
                yield label.replace("*", name.removeprefix(prefix).removesuffix(suffix)), name
        if not star:
            yield label, metric


def _shares(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of a step that its counts give."""
    counts = {name: value for name in row if (value := finite_value(row, name)) is not None}
    total = sum(value for name, value in counts.items() if name.startswith("rows/"))
    shares = {
        name.replace("rows/", "invalid_share/").replace("truncated/", "truncated_share/"): value / total
        for name, value in counts.items()
        if total and name.startswith(("rows/", "truncated/")) and name not in _NO_REASONS
    }
    if calls := counts.get("tools/calls"):
        shares["tool_error_share"] = counts.get("tools/errors", 0.0) / calls
    return shares


def _scores(evaluation: EvaluationResult) -> dict[str, float | None]:
    """Return the scores over valid completions."""
    overall = evaluation.overall
    passed = {f"held_out/pass@{k}": both.get("valid") for k, both in overall.pass_at.items()}
    return {"held_out/mean": overall.mean_valid, **passed}


def _mean(metric: str, rows: Rows) -> float | None:
    known = [value for row in rows if (value := metric_value(row, metric)) is not None]
    return sum(known) / len(known) if known else None
