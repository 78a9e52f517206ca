"""`penstock compare`: the metrics of several runs side by side, at the same step. Reads only their folders."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from stream.errors import PenstockError, SettingsError
from workers.run.plot import Rows
from workers.runs.find import find_run_folder
from workers.runs.metrics_file import read_metrics
from workers.runs.transcript import escape_controls
from workers.terminal.output import make_console, print_json

_SHOWN: Final = (
    *(
        "reward/mean",
        "reward/std",
        "trained/reward_mean",
        "reward/part/*",
        "eval/mean/*",
        "eval/pass@*",
        "valid_fraction",
    ),
    *("rows/*", "length/mean", "turns/mean", "staleness/mean", "entropy", "kl/*", "correction/k3_kl", "grad_norm"),
    *("clip_fraction", "tokens_per_second", "step_seconds", "seconds"),
)
"""Metrics that are compared unless others are named."""


class Comparison(Struct, frozen=True, kw_only=True):
    """Metrics of several runs, each a mean over the same steps."""

    step: int
    """The last step of the mean."""
    steps: int
    """The number of steps in the mean, at most."""
    runs: list[str]
    """Folders."""
    last_steps: list[int]
    """The last step that each run has."""
    metrics: dict[str, list[float | None]]
    """A value for each run, in their order; None: the run has no such metric in these steps."""


def show_comparison(
    targets: Sequence[str], *, step: int | None, window: int, names: Sequence[str], as_json: bool = False
) -> None:
    """Print the metrics of runs side by side.

    Args:
        targets: folder, settings file or name of each run.
        step: the last step of the mean; None: the last one that all runs have.
        window: steps in the mean.
        names: metrics, with `*` and `?`; none: the usual ones.
        as_json: print one JSON object.

    Raises:
        SettingsError: fewer than two runs were named.
        PenstockError: there is no such run, it has no step yet, or no metric has such a name.
    """
    if len(targets) < 2:
        raise SettingsError("name two runs or more to compare")
    found = compare_runs([find_run_folder(target) for target in targets], step, window, names or _SHOWN)
    if as_json:
        print_json(found)
        return
    console = make_console()
    console.print(_table(found))
    over = f"means over {found.steps} steps up to step {found.step}" if found.steps > 1 else f"step {found.step}"
    last = ", ".join(f"{_label(run)} {last}" for run, last in zip(found.runs, found.last_steps, strict=True))
    console.print(Text(f"{over}; last steps: {last}", "bright_black"))


def compare_runs(folders: Sequence[Path], step: int | None, window: int, names: Sequence[str]) -> Comparison:
    """Return the metrics of runs, averaged over the same steps."""
    logs = [_read(folder) for folder in folders]
    last_steps = [int(rows[-1]["step"]) for rows in logs]
    end = min(last_steps) if step is None else step
    windows = [[row for row in rows if end - window < row["step"] <= end] for rows in logs]
    known = {name: None for rows in windows for row in rows for name in row}
    chosen = [name for pattern in names for name in known if fnmatchcase(name, pattern)]
    metrics = {name: [_mean(rows, name) for rows in windows] for name in dict.fromkeys(chosen)}
    metrics = {name: values for name, values in metrics.items() if any(value is not None for value in values)}
    if not metrics:
        raise PenstockError(
            f"no metric is named {' or '.join(names)} in steps {end - window + 1} to {end} of these runs"
        )
    steps = max(len(rows) for rows in windows)
    return Comparison(step=end, steps=steps, runs=[*map(str, folders)], last_steps=last_steps, metrics=metrics)


def _read(folder: Path) -> Rows:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if isinstance(row.get("step"), int)]
    if not rows:
        raise PenstockError(f"{folder / 'metrics.jsonl'} has no step yet")
    return rows


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the mean of a metric over the steps that have a finite value; None if none has."""
    values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])]
    return sum(values) / len(values) if values else None


def _table(found: Comparison) -> Table:
    """Return one row for each metric; of two runs also the difference."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("metric", no_wrap=True)
    for run in found.runs:
        table.add_column(_label(run), justify="right", no_wrap=True)
    if is_pair := len(found.runs) == 2:
        table.add_column("difference", justify="right", no_wrap=True)
    for name, values in found.metrics.items():
        cells = ["-" if value is None else f"{value:.4g}" for value in values]
        if is_pair:
            first, second = values
            cells.append("-" if first is None or second is None else f"{second - first:+.3g}")
        table.add_row(escape_controls(name), *cells)
    return table


def _label(run: str) -> str:
    return escape_controls(Path(run).name or run)
