"""Draws a run's progress as a picture: reward and its parts, loss, length, entropy, KL, validity, staleness, speed."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from stream.durable import write_file_atomically
from stream.errors import PenstockError
from stream.operator.status import RunStatus
from workers.runs.evaluations import read_evaluations
from workers.runs.metrics_file import Chart, MetricCharts, make_charts, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe-Ito: color-blind safe
_INK, _GRID = "#333333", "#e8e8e8"
_WINDOW = 7
"""Steps in the running mean of a thick line."""
_PANELS = ("reward", "parts", "loss", "gradient", "length", "entropy", "kl", "valid", "staleness", "throughput")
"""The charts of `workers.runs.metrics_file` that the picture has; one without a value is left out."""


def draw_progress(folder: Path, status: RunStatus | None = None) -> Path:
    """Draw `metrics.jsonl` of a run's folder as `progress.png`. Returns the path of the picture.

    The title has step and version of `status`, as the progress display has; None: those of the last line of metrics.

    Raises:
        PenstockError: no step has been logged yet.
    """
    if not (rows := read_metrics(folder / "metrics.jsonl")):
        raise PenstockError(f"{folder / 'metrics.jsonl'} has no step yet")
    step, version = rows[-1]["step"], rows[-1].get("version", "-")
    if status is not None and "step" in status.policy:
        step, version = int(status.policy["step"]), status.version
    minutes = sum(row.get("step_seconds", 0.0) for row in rows) / 60
    facts, picture = f"step {step}, policy version {version}, {minutes:.1f} min", io.BytesIO()
    charts = make_charts(rows, read_evaluations(folder), max_points=sys.maxsize)
    make_figure(charts, folder.resolve().name, facts).savefig(picture)
    write_file_atomically(folder / "progress.png", picture.getvalue())
    return folder / "progress.png"


def make_figure(charts: MetricCharts, name: str, facts: str) -> "Figure":
    """Return a figure with the charts of `_PANELS`, titled by the run's name and facts."""
    from matplotlib.figure import Figure

    known = {chart.name: chart for chart in charts.charts}
    panels = [known[panel] for panel in _PANELS if panel in known]
    if len(panels) % 3 == 1 and "gradient" in known:  # rather than a row with one panel
        panels.remove(known["gradient"])
    lines = -(-len(panels) // 3)
    height = 2.7 * lines + 0.5
    figure = Figure(figsize=(12.6, height), dpi=140, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, rect=(0, 0, 1, 1 - 0.4 / height))  # type: ignore[union-attr,call-arg]
    figure.text(0.012, 1 - 0.3 / height, name, fontsize=13, fontweight="bold", color=_INK)
    figure.text(0.988, 1 - 0.3 / height, facts, fontsize=10, color=_INK, ha="right")
    for number, panel in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(lines, 3, number), panel, charts.steps)
    return figure


def _draw_panel(axes: "Axes", chart: Chart, all_steps: Sequence[float]) -> None:
    axes.set_title(chart.title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.set(ylabel=chart.unit, xlim=(all_steps[0] - 0.5, all_steps[-1] + 0.5))
    axes.grid(axis="y", color=_GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params("x", integer=True, nbins=6, min_n_ticks=1)
    for line, color in zip(chart.lines, _COLORS, strict=False):
        steps = [step for step, value in zip(all_steps, line.values, strict=True) if value is not None]
        values, label = [value for value in line.values if value is not None], line.label[:28]
        if label in ("longest", "oldest token"):  # a mean of maxima would be no maximum
            axes.plot(steps, values, color=color, linewidth=1, alpha=0.5, label=label)
        elif len(values) > max(_WINDOW, len(all_steps) // 2):
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(steps, smooth(values), color=color, linewidth=2, label=label)
        else:
            axes.plot(steps, values, color=color, linewidth=2, marker="o", markersize=4, label=label)
    low, high = axes.dataLim.intervaly
    if chart.low is not None or (chart.name != "loss" and low >= 0 and high <= 1):
        axes.set_ylim(0, 1.1 * high or 1 if chart.low is not None else 1.02)
    if len(chart.lines) > 1:
        axes.legend(frameon=False, fontsize=8)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centered running mean; windows are shorter at both ends, so that it begins and ends as the data do."""
    halves = [min(_WINDOW // 2, i, len(values) - 1 - i) for i in range(len(values))]
    return [fmean(values[i - half : i + half + 1]) for i, half in enumerate(halves)]
