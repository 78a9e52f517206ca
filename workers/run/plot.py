"""Plot the progress of a run by step: reward and its parts, loss, length, entropy, KL, validity, staleness, speed."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream.durable import write_file_atomically
from stream.errors import PenstockError
from stream.operator.run_status import RunStatus
from workers.runs.metrics_file import DisplayMetric, finite_value, metric_value, part_names, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"  # Okabe-Ito: color-blind safe
_SKY, _YELLOW = "#56B4E9", "#E69F00"
_PALETTE = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _YELLOW)
_INK, _FAINT = "#333333", "#9a9a9a"
_WINDOW = 7
"""Steps in the running mean of the thick line."""
_MAX_PARTS = len(_PALETTE)
_COLUMNS = 3
_PANEL_INCHES = (4.1, 2.75)

Points = list[tuple[float, float]]
"""(step, value) pairs in the order of the steps."""
Rows = list[dict[str, Any]]
"""The metrics of each step, in the order of the steps."""
Panel = Callable[["Axes", Rows], None]


def draw_progress(folder: Path, status: RunStatus | None = None) -> Path:
    """Plot `metrics.jsonl` of a run's folder to `progress.png`. Returns the path of the image.

    Args:
        folder: of the run.
        status: the run's last status, whose step and version the title shows, as the progress display does; None: those
            of the last line of metrics.

    Raises:
        PenstockError: no step has been logged yet.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        raise PenstockError(f"{folder / 'metrics.jsonl'} has no step yet")
    panels = _panels(rows)
    lines = -(-len(panels) // _COLUMNS)
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": _INK, "axes.labelcolor": _INK}):
        size = (_COLUMNS * _PANEL_INCHES[0], lines * _PANEL_INCHES[1] + 0.45)
        figure = Figure(figsize=size, dpi=140, facecolor="white", layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.05)  # type: ignore[union-attr,call-arg]
        places = list(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
        for axes, panel in zip(places, panels, strict=False):
            panel(axes, rows)
            _limit_steps(axes, rows)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        for axes in places[len(panels) - _COLUMNS : len(panels)]:
            axes.set_xlabel("step")
        figure.suptitle(_title(folder, rows, status), x=0.012, ha="left", fontsize=11)
        out, picture = folder / "progress.png", io.BytesIO()
        figure.savefig(picture)
    write_file_atomically(out, picture.getvalue())
    return out


def smooth(points: Points, window: int = _WINDOW) -> Points:
    """Return the centered running mean; windows are shorter at both ends, so that it begins and ends as the data do."""
    values = [value for _, value in points]
    means = []
    for i, (step, _) in enumerate(points):
        half = min(window // 2, i, len(points) - 1 - i)
        near = values[i - half : i + half + 1]
        means.append((step, sum(near) / len(near)))
    return means


def _panels(rows: Rows) -> list[Panel]:
    """Return the panels in the order of reading; those without data are left out, except what every run has."""
    panels: list[Panel] = [_reward]
    panels += [_parts] if len(part_names(rows)) > 1 else []
    panels += [_loss, _length, _entropy]
    panels += [_divergence] if any(_values(rows, name) for name, _, _ in _DIVERGENCES) else []
    panels += [_valid, _staleness, _speed]
    if len(panels) % _COLUMNS and _values(rows, "grad_norm"):
        panels.insert(panels.index(_length), _gradient)
    return panels


def _series(rows: Rows, what: DisplayMetric) -> Points:
    return [(row["step"], value) for row in rows if (value := metric_value(row, what)) is not None]


def _values(rows: Rows, name: str) -> Points:
    """Return the finite values of one metric."""
    return [(row["step"], value) for row in rows if (value := finite_value(row, name)) is not None]


def _title(folder: Path, rows: Rows, status: RunStatus | None) -> str:
    name = folder.resolve().name
    last = rows[-1]
    step, version = last["step"], last.get("version")
    if status is not None and "step" in status.policy:
        step, version = int(status.policy["step"]), status.version
    parts = [f"step {step}"]
    if version is not None:
        parts.append(f"policy version {version:g}")
    seconds = sum(row.get("step_seconds", 0.0) for row in rows)
    if seconds:
        parts.append(f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s")
    if len(rows) > _WINDOW:
        parts.append(f"thick lines are means over {_WINDOW} steps")
    bold = name.replace("_", r"\_").replace("-", "{-}")  # in mathtext a bare hyphen is a minus
    return rf"$\bf{{{bold}}}$   {', '.join(parts)}"


def _reward(axes: "Axes", rows: Rows) -> None:
    points, held_out = _series(rows, "reward"), _values(rows, "eval/mean/valid")
    _frame(axes, "Reward", "mean of a step", points)
    _line_and_trend(axes, points, _BLUE)
    if held_out:
        axes.plot(*_columns(held_out), color=_ORANGE, marker="D", markersize=4, linewidth=1.0, label="held-out prompts")
        _legend(axes, "lower right")
    _bound_to_unit(axes, points + held_out)


def _parts(axes: "Axes", rows: Rows) -> None:
    names = part_names(rows)
    lines = [(name, _values(rows, f"reward/part/{name}/mean")) for name in names[:_MAX_PARTS]]
    _frame(axes, "Reward parts", "mean, before weights", [point for _, points in lines for point in points])
    for (name, points), color in zip(lines, _PALETTE, strict=False):
        axes.plot(*_columns(smooth(points)), color=color, linewidth=1.8, label=_clip(name))
    _legend(axes, "best")
    if len(names) > _MAX_PARTS:
        axes.set_title(f"{_MAX_PARTS} of {len(names)} parts", loc="right", fontsize=8.5, color=_FAINT)
    _bound_to_unit(axes, [point for _, points in lines for point in points])


def _loss(axes: "Axes", rows: Rows) -> None:
    points = _values(rows, "loss")
    _frame(axes, "Loss", "mean over loss tokens", points)
    _line_and_trend(axes, points, _PURPLE)


def _gradient(axes: "Axes", rows: Rows) -> None:
    points = _values(rows, "grad_norm")
    _frame(axes, "Gradient norm", "before clipping", points)
    _line_and_trend(axes, points, _SKY)
    axes.set_ylim(bottom=0)


def _length(axes: "Axes", rows: Rows) -> None:
    mean, longest = _values(rows, "length/mean"), _values(rows, "length/max")
    _frame(axes, "Completion length", "sampled tokens", mean)
    if longest:
        axes.plot(*_columns(longest), color=_YELLOW, linewidth=1.1, alpha=0.6, label="longest")
    _thick(axes, mean, _YELLOW, label="mean")
    _legend(axes, "best")
    axes.set_ylim(bottom=0)


def _entropy(axes: "Axes", rows: Rows) -> None:
    points = _values(rows, "entropy")
    _frame(axes, "Entropy", "nats per token", points)
    _line_and_trend(axes, points, _GREEN)
    axes.set_ylim(bottom=0)


_DIVERGENCES = (
    ("reference/kl", "to the reference policy", _ORANGE),
    ("kl/k3", "of the updates of a batch", _BLUE),
    ("correction/k3_kl", "trainer to engine (off-policy)", _FAINT),
)
"""Metrics, labels and colors; only those that can move under the run's settings are in its metrics."""


def _divergence(axes: "Axes", rows: Rows) -> None:
    lines = [(_values(rows, name), label, color) for name, label, color in _DIVERGENCES]
    _frame(axes, "KL divergence", "nats per token", [point for points, _, _ in lines for point in points])
    for points, label, color in lines:
        _thick(axes, points, color, label=label)
    _legend(axes, "best")


def _staleness(axes: "Axes", rows: Rows) -> None:
    mean, most = _series(rows, "staleness"), _series(rows, "staleness_max")
    _frame(axes, "Staleness", "policy versions", mean)
    if most:
        axes.step(*_columns(most), where="mid", color=_ORANGE, linewidth=1.1, alpha=0.5, label="oldest token")
    if mean:
        _thick(axes, mean, _ORANGE, label="mean over tokens")
        axes.fill_between(*_columns(mean), color=_ORANGE, alpha=0.12, linewidth=0)
    _legend(axes, "upper right")
    top = max((value for _, value in most or mean), default=1.0)
    axes.set_ylim(0, max(1.0, top) * 1.3)


def _valid(axes: "Axes", rows: Rows) -> None:
    percent = [(step, 100 * value) for step, value in _series(rows, "valid")]
    _frame(axes, "Validity", "% of completions measured", percent)
    if percent:
        _thick(axes, percent, _GREEN)
        axes.fill_between(*_columns(percent), color=_GREEN, alpha=0.12, linewidth=0)
    axes.set_ylim(0, 104)


def _speed(axes: "Axes", rows: Rows) -> None:
    points = _series(rows, "tokens_per_second")
    _frame(axes, "Throughput", "sampled tokens a second", points)
    _line_and_trend(axes, points, _PURPLE)
    axes.set_ylim(0, 1.15 * max((value for _, value in points), default=1.0))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _limit_steps(axes: "Axes", rows: Rows) -> None:
    """Begin the axis at the first step and end it at the last one, in every panel alike."""
    first, last = rows[0]["step"], rows[-1]["step"]
    margin = 0.012 * (last - first) if last > first else 0.5
    axes.set_xlim(first - margin, last + margin)


def _bound_to_unit(axes: "Axes", points: Points) -> None:
    """Show the whole range of rewards that are between 0 and 1."""
    values = [value for _, value in points]
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)


def _legend(axes: "Axes", place: str) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, loc=place, borderaxespad=0.2, handlelength=1.4, labelspacing=0.3)


def _clip(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:27]}…"


def _thick(axes: "Axes", points: Points, color: str, label: str | None = None) -> None:
    """Plot a thick line, with markers where there are few steps."""
    if points:
        marker = "o" if len(points) <= _WINDOW else None
        axes.plot(*_columns(points), color=color, linewidth=2.0, marker=marker, markersize=3.5, label=label)


def _line_and_trend(axes: "Axes", points: Points, color: str) -> None:
    """Plot each step as a faint line and the running mean as a thick one; few steps as one line with markers."""
    if len(points) <= _WINDOW:
        _thick(axes, points, color)
        return
    axes.plot(*_columns(points), color=color, linewidth=0.9, alpha=0.35)
    axes.plot(*_columns(smooth(points)), color=color, linewidth=2.2)


def _frame(axes: "Axes", title: str, unit: str, points: Points) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK)
    axes.set_ylabel(unit)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_FAINT, labelcolor=_INK, length=3, labelbottom=True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(_FAINT)
    if not points:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=_FAINT)


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
