"""Draws a run's progress as a picture: reward and its parts, loss, length, entropy, KL, validity, staleness, speed."""

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from stream.durable import write_file_atomically
from stream.errors import PenstockError
from stream.operator.status import RunStatus
from workers.runs.metrics_file import Rows, metric_value, part_names, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe-Ito: color-blind safe
_INK, _GRID = "#333333", "#e8e8e8"
_WINDOW = 7
"""Steps in the running mean of a thick line."""
_Panel = tuple[str, str, dict[str, str]]
"""Title, unit, and for each metric the label of its line."""
_REWARD: _Panel = ("Reward", "mean of a step", {"reward": "training", "eval/mean/valid": "held-out prompts"})
_GRADIENT: _Panel = ("Gradient norm", "before clipping", {"grad_norm": ""})
_PANELS: tuple[_Panel, ...] = (
    ("Loss", "mean over loss tokens", {"loss": ""}), _GRADIENT,
    ("Completion length", "sampled tokens", {"length/mean": "mean", "length/max": "longest"}),
    ("Entropy", "nats / token", {"entropy": ""}),
    ("KL divergence", "nats / token", {"reference/kl": "to reference", "kl/k3": "in batch", "off_policy": "to engine"}),
    ("Validity", "share of completions", {"valid": ""}),
    ("Staleness", "policy versions", {"staleness": "mean over tokens", "staleness_max": "oldest token"}),
    ("Throughput", "sampled tokens a second", {"tokens_per_second": ""}),
)  # fmt: skip
"""Below the reward and its parts; what was never measured is left out."""
_SIGNED = ("Reward", "Reward parts", "Loss")  # the others begin at 0


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
    make_figure(rows, folder.resolve().name, facts).savefig(picture)
    write_file_atomically(folder / "progress.png", picture.getvalue())
    return folder / "progress.png"


def make_figure(rows: Rows, name: str, facts: str) -> "Figure":
    """Return a figure with a panel for each group of metrics that the rows have, titled by the run's name and facts."""
    from matplotlib.figure import Figure

    parts = {f"reward/part/{part}/mean": part[:28] for part in part_names(rows)[: len(_COLORS)]}
    optional = ([("Reward parts", "mean, before weights", parts)] if len(parts) > 1 else []) + list(_PANELS)
    panels = [_REWARD, *(panel for panel in optional if any(_series(rows, metric)[0] for metric in panel[2]))]
    if len(panels) % 3 == 1 and _GRADIENT in panels:  # rather than a row with one panel
        panels.remove(_GRADIENT)
    lines = -(-len(panels) // 3)
    height = 2.7 * lines + 0.5
    figure = Figure(figsize=(12.6, height), dpi=140, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, rect=(0, 0, 1, 1 - 0.4 / height))  # type: ignore[union-attr,call-arg]
    figure.text(0.012, 1 - 0.3 / height, name, fontsize=13, fontweight="bold", color=_INK)
    figure.text(0.988, 1 - 0.3 / height, facts, fontsize=10, color=_INK, ha="right")
    for number, panel in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(lines, 3, number), rows, *panel)
    return figure


def _draw_panel(axes: "Axes", rows: Rows, title: str, unit: str, metrics: dict[str, str]) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.set(ylabel=unit, xlim=(rows[0]["step"] - 0.5, rows[-1]["step"] + 0.5))
    axes.grid(axis="y", color=_GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params("x", integer=True, nbins=6, min_n_ticks=1)
    for (metric, label), color in zip(metrics.items(), _COLORS, strict=False):
        steps, values = _series(rows, metric)
        if metric in ("length/max", "staleness_max"):  # a mean of maxima would be no maximum
            axes.plot(steps, values, color=color, linewidth=1, alpha=0.5, label=label)
        elif len(values) > max(_WINDOW, len(rows) // 2):
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(steps, smooth(values), color=color, linewidth=2, label=label)
        elif values:
            axes.plot(steps, values, color=color, linewidth=2, marker="o", markersize=4, label=label)
    low, high = axes.dataLim.intervaly
    if title not in _SIGNED or (title != "Loss" and low >= 0 and high <= 1):
        axes.set_ylim(0, 1.02 if title in _SIGNED else 1.1 * high or 1)
    if len(metrics) > 1:
        axes.legend(frameon=False, fontsize=8)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centered running mean; windows are shorter at both ends, so that it begins and ends as the data do."""
    halves = [min(_WINDOW // 2, i, len(values) - 1 - i) for i in range(len(values))]
    return [fmean(values[i - half : i + half + 1]) for i, half in enumerate(halves)]


def _series(rows: Rows, metric: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a metric, and its values."""
    found = {row["step"]: value for row in rows if (value := metric_value(row, metric)) is not None}
    return list(found), list(found.values())
