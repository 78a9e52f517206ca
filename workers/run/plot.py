"""Plot reward, staleness, validity and throughput of a run by step."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stream.errors import PenstockError
from workers.run.display_metrics import DisplayMetric, metric_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"  # Okabe-Ito: color-blind safe
_INK, _FAINT = "#333333", "#9a9a9a"
_WINDOW = 7
"""Steps in the running mean of the thick line."""

Points = list[tuple[float, float]]
"""(step, value) pairs in the order of the steps."""


def draw_progress(folder: Path) -> Path:
    """Plot `metrics.jsonl` of a run's folder to `progress.png`. Returns the path of the image.

    Raises:
        PenstockError: no step has been logged yet.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        raise PenstockError(f"{folder / 'metrics.jsonl'} has no step yet")
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = Figure(figsize=(10.5, 6.6), dpi=140, facecolor="white", layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.05)  # type: ignore[union-attr,call-arg]
        reward, staleness, valid, speed = figure.subplots(2, 2, sharex=True).flat
        _reward(reward, _series(rows, "reward"))
        _staleness(staleness, _series(rows, "staleness"), _series(rows, "staleness_max"))
        _valid(valid, _series(rows, "valid"))
        _speed(speed, _series(rows, "tokens_per_second"))
        for axes in (valid, speed):
            axes.set_xlabel("step")
        figure.suptitle(_title(folder, rows), x=0.012, ha="left", fontsize=11)
        out = folder / "progress.png"
        figure.savefig(out)
    return out


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step, in order. If a step was repeated after a crash, its last line counts."""
    if not file.exists():
        return []
    steps: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError:
            continue  # incomplete line of a killed trainer
        steps[int(row.get("step", number))] = row | {"step": int(row.get("step", number))}
    return [steps[step] for step in sorted(steps)]


def smooth(points: Points, window: int = _WINDOW) -> Points:
    """Return the centered running mean; windows are shorter at both ends."""
    half = window // 2
    values = [value for _, value in points]
    return [
        (step, sum(near) / len(near))
        for i, (step, _) in enumerate(points)
        if (near := values[max(0, i - half) : i + half + 1])
    ]


def _series(rows: list[dict[str, Any]], what: DisplayMetric) -> Points:
    return [(row["step"], value) for row in rows if (value := metric_value(row, what)) is not None]


def _title(folder: Path, rows: list[dict[str, Any]]) -> str:
    name = folder.resolve().name
    last = rows[-1]
    parts = [f"{last['step']} steps"]
    if "version" in last:
        parts.append(f"policy version {last['version']:g}")
    if (seconds := last.get("time", 0) - rows[0].get("time", 0)) > 0:
        parts.append(f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s")
    bold = name.replace("_", r"\_").replace("-", "{-}")  # in mathtext a bare hyphen is a minus
    return rf"$\bf{{{bold}}}$   {', '.join(parts)}"


def _reward(axes: "Axes", points: Points) -> None:
    _frame(axes, "Reward", "mean of a step", points)
    _line_and_trend(axes, points, _BLUE)
    values = [value for _, value in points]
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)


def _staleness(axes: "Axes", mean: Points, most: Points) -> None:
    _frame(axes, "Staleness", "policy versions", mean)
    if most:
        axes.step(*_columns(most), where="mid", color=_ORANGE, linewidth=1.1, alpha=0.5, label="oldest token")
    if mean:
        axes.plot(*_columns(mean), color=_ORANGE, linewidth=2.0, label="mean over tokens")
        axes.fill_between(*_columns(mean), color=_ORANGE, alpha=0.12, linewidth=0)
        axes.legend(frameon=False, fontsize=8.5, loc="upper right", ncols=2, borderaxespad=0.1)
    top = max((value for _, value in most or mean), default=1.0)
    axes.set_ylim(0, max(1.0, top) * 1.3)


def _valid(axes: "Axes", points: Points) -> None:
    percent = [(step, 100 * value) for step, value in points]
    _frame(axes, "Validity", "% of completions measured", percent)
    if percent:
        axes.plot(*_columns(percent), color=_GREEN, linewidth=2.0)
        axes.fill_between(*_columns(percent), color=_GREEN, alpha=0.12, linewidth=0)
    axes.set_ylim(0, 104)


def _speed(axes: "Axes", points: Points) -> None:
    _frame(axes, "Throughput", "sampled tokens a second", points)
    _line_and_trend(axes, points, _PURPLE)
    axes.set_ylim(0, 1.15 * max((value for _, value in points), default=1.0))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _line_and_trend(axes: "Axes", points: Points, color: str) -> None:
    """Plot each step as a faint line and the running mean as a thick one; few steps as one line with markers."""
    if len(points) <= _WINDOW:
        axes.plot(*_columns(points), color=color, linewidth=2.0, marker="o", markersize=3.5)
        return
    axes.plot(*_columns(points), color=color, linewidth=0.9, alpha=0.35, label="each step")
    axes.plot(*_columns(smooth(points)), color=color, linewidth=2.2, label=f"mean of {_WINDOW}")


def _frame(axes: "Axes", title: str, unit: str, points: Points) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK)
    axes.set_ylabel(unit)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_FAINT, labelcolor=_INK, length=3, labelbottom=True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.015)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(_FAINT)
    if not points:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=_FAINT)


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
