"""Progress of a running run: a live table on a terminal, else one line every ten seconds."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from msgspec import Struct, field
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stream.operator.status import RunStatus
from stream.wording import format_counts, format_duration
from workers.runs.metrics_file import metric_value
from workers.runs.status import QueueReport, format_result, queue_report

_LINE_EVERY_S = 10.0
_LINE_WIDTH = 100
_BLOCKS = "▁▂▃▄▅▆▇█"
_HISTORY = 24
"""Steps in the sparkline; with its scale it fits 80 columns."""
_BAR = 46
_ACCENT, _QUIET, _ALARM = "cyan", "bright_black", "yellow"


class SupervisorState(Struct, kw_only=True):
    """The supervisor's part of the display; the rest comes from the run's streams."""

    run: str
    phase: str
    seconds: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)
    """Restarts after a failure, by process name."""
    memory: str = ""
    """Which process makes the machine swap; empty if none does."""
    disk: list[str] = field(default_factory=list)
    """Disks that cannot be written, for which the run waits."""


class ProgressDisplay(Protocol):
    """Shows the progress of a run; a context manager."""

    def show(self, status: RunStatus | None, state: SupervisorState) -> None:
        """Show the current status; `status` is None if the run's status is not available."""

    def print_lines(self, lines: Sequence[Text]) -> None:
        """Print lines that stay on the screen."""

    @property
    def width(self) -> int:
        """Columns of a printed line; 0: nothing is printed."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def choose_display(quiet: bool) -> ProgressDisplay:
    """Return the display for stderr: a table on a terminal, else lines; nothing if `quiet`."""
    if quiet:
        return SilentDisplay()
    return TableDisplay(Console(stderr=True)) if sys.stderr.isatty() else LineDisplay()


class SilentDisplay:
    """Shows nothing."""

    @property
    def width(self) -> int:
        """No columns: nothing is printed."""
        return 0

    def show(self, status: RunStatus | None, state: SupervisorState) -> None:
        """Show nothing."""

    def print_lines(self, lines: Sequence[Text]) -> None:
        """Print nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class LineDisplay(SilentDisplay):
    """Prints one plain line every ten seconds, and whenever the phase or the pause state changes."""

    def __init__(self, every_s: float = _LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._next = 0.0
        self._told: object = None

    @property
    def width(self) -> int:
        """Columns of a line that does not go to a terminal."""
        return _LINE_WIDTH

    def show(self, status: RunStatus | None, state: SupervisorState) -> None:
        """Print a line if it is due."""
        now, tells = time.monotonic(), (state.phase, status and status.paused)
        if now < self._next and tells == self._told:
            return
        self._next, self._told = now + self._every_s, tells
        print(format_line(status, state), file=sys.stderr, flush=True)  # noqa: T201  (this is the command's output)

    def print_lines(self, lines: Sequence[Text]) -> None:
        """Print plain lines."""
        for line in lines:
            print(line.plain, file=sys.stderr, flush=True)  # noqa: T201


class TableDisplay:
    """A live table on a terminal; its last state stays on the screen."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live  # only here: `penstock queues` uses the tables below

        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._rewards: dict[int, float] = {}

    def show(self, status: RunStatus | None, state: SupervisorState) -> None:
        """Redraw the table."""
        if status is not None and (reward := metric_value(status.metrics, "reward")) is not None:
            self._rewards[int(status.policy.get("step", 0))] = reward
        recent = {step: self._rewards[step] for step in sorted(self._rewards)[-_HISTORY:]}
        self._live.update(render_table(status, state, recent), refresh=True)

    def print_lines(self, lines: Sequence[Text]) -> None:
        """Print lines above the table."""
        for line in lines:
            self._live.console.print(line, soft_wrap=True, highlight=False)

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return self._live.console.width

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def format_line(status: RunStatus | None, state: SupervisorState) -> str:
    """Format the run's status as one line."""
    parts = [f"{state.run} {format_duration(state.seconds)}", state.phase, *_alarms(state)]
    if status is not None:
        report, counts = queue_report(state.run, status), status.prompt_counts
        depths = " ".join(f"{name} {stage.depth}" for name, stage in report.stages.items())
        parts += [
            *([str(status.paused)] if status.paused else []),
            f"step {status.policy.get('step', 0)}",
            f"version {max(status.version, 0)}",
            *(f"{name} {value}" for name, value in _metric_values(status)),
            depths,
            *_evaluation_parts(report),
            " ".join(f"{name} {counts[name]}" for name in ("trained", "dropped", "dead", "outstanding", "fed")),
        ]
    if state.restarts:
        parts.append("restarts " + " ".join(f"{name} {count}" for name, count in sorted(state.restarts.items())))
    return " | ".join(parts)


def render_table(status: RunStatus | None, state: SupervisorState, rewards: Mapping[int, float]) -> RenderableType:
    """Return the run's status as a terminal table; `rewards` are the last ones, by step."""
    head = Text.assemble(
        (state.run, "bold"), "  ", (state.phase, _QUIET), "  ", (format_duration(state.seconds), _QUIET)
    )
    alarms = [Text(text, _ALARM) for text in _alarms(state)]
    if status is None:
        return Padding(Group(head, *alarms), (1, 2))
    head.append_text(
        Text.assemble(
            ("   step ", _QUIET), (str(status.policy.get("step", 0)), "bold"),
            ("  version ", _QUIET), (str(status.version) if status.version >= 0 else "-", "bold"),
        )
    )  # fmt: skip
    report = queue_report(state.run, status)
    paused = [Text(report.paused, _ALARM)] if report.paused else []
    parts = [
        head,
        *paused,
        *alarms,
        *_bar(status),
        Text(),
        stage_table(report),
        Text(),
        _metric_text(status, rewards),
        *evaluation_lines(report),
        prompt_counts_text(report),
    ]
    if state.restarts:
        restarts = ", ".join(f"{name} {count}x" for name, count in sorted(state.restarts.items()))
        parts.append(Text.assemble(("restarted  ", _QUIET), (restarts, _ALARM)))
    return Padding(Group(*parts), (1, 2))


def _alarms(state: SupervisorState) -> list[str]:
    return [*state.disk, *([f"limited by memory: {state.memory}"] if state.memory else [])]


def stage_table(report: QueueReport) -> Table:
    """Return a table with one row per stage."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=_QUIET)
    table.add_column("stage")
    for heading in ("depth", "claimed", "lag", "delayed", "oldest", "rate"):
        table.add_column(heading, justify="right", min_width=11 if heading == "oldest" else 7)
    for name, stage in report.all_stages.items():
        table.add_row(
            Text(name, "bold"),
            _count(stage.depth),
            _count(stage.claimed),
            _count(stage.lag),
            _count(stage.delayed, _ALARM),
            Text(format_duration(stage.oldest_age_s) if stage.depth else "-", "" if stage.depth else _QUIET),
            Text(f"{stage.rate:.1f}/s" if stage.rate else "-", _ACCENT if stage.rate else _QUIET),
        )
    return table


def evaluation_lines(report: QueueReport) -> list[RenderableType]:
    """Return one line for the running evaluation and one for the last result, where they exist."""
    if report.evaluation is None:
        return []
    texts = {"evaluating": report.evaluation.progress, "evaluation": format_result(report.evaluation.result)}
    return [Text.assemble((f"{name} ", _QUIET), what) for name, what in texts.items() if what]


def prompt_counts_text(report: QueueReport) -> Text:
    """Return the fed prompts by outcome: trained, dropped, dead and outstanding."""
    text = Text.assemble(("fed ", _QUIET), f"{report.fed:,}")
    for sign, name in (("=", "trained"), ("+", "dropped"), ("+", "dead"), ("+", "outstanding")):
        count = getattr(report, name)
        text.append_text(
            Text.assemble((f" {sign} {name} ", _QUIET), (f"{count:,}", _ALARM if name == "dead" and count else ""))
        )
    if report.dropped_by_reason:
        reasons = format_counts(dict(sorted(report.dropped_by_reason.items())))
        text.append(f"\ndropped: {reasons}", _QUIET)
    return text


def _bar(status: RunStatus) -> list[RenderableType]:
    """Return a progress bar over all prompts; empty if their total is unknown."""
    total = int(status.feed.get("total", 0))
    if not total:
        return []
    counts = status.prompt_counts
    ended = counts["trained"] + counts["dropped"] + counts["dead"]
    row = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=total, completed=ended, width=_BAR, complete_style=_ACCENT, finished_style=_ACCENT)
    row.add_row(bar, Text.assemble(f"{ended:,}", (f" of {total:,} prompts", _QUIET), f"  {ended / total:.0%}"))
    return [Text(), row]


def _metric_text(status: RunStatus, rewards: Mapping[int, float]) -> Text:
    """Return the last step's metrics as text."""
    text = Text()
    for name, value in _metric_values(status):
        text.append(f"{name} ", _QUIET)
        text.append(value, "bold" if name == "reward" else "")
        if name == "reward":
            if len(rewards) > 1:
                text.append(f"  {sparkline(list(rewards.values()))}", _ACCENT)
                text.append(f"  {describe_scale(rewards)}", _QUIET)
            text.append("\n")
        else:
            text.append("   ")
    return text or Text("no step yet", _QUIET)


def sparkline(values: list[float]) -> str:
    """Return one block character per value, scaled between the minimum and the maximum."""
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)


def describe_scale(values: Mapping[int, float]) -> str:
    """Return the range of a sparkline's values, and of its steps: `0.1 to 0.75, steps 1 to 20`."""
    low, high = min(values.values()), max(values.values())
    heights = f"all {low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    return f"{heights}, steps {min(values)} to {max(values)}"


def _metric_values(status: RunStatus) -> list[tuple[str, str]]:
    """Return names and formatted values of the available metrics."""
    metrics, items = status.metrics, []
    if (reward := metric_value(metrics, "reward")) is not None:
        items.append(("reward", f"{reward:.3f}"))
    if (distance := metric_value(metrics, "off_policy")) is not None:
        items.append(("off-policy KL", f"{distance:.4f}"))
    if (valid := metric_value(metrics, "valid")) is not None:
        items.append(("valid", f"{valid:.1%}"))
    if (mean := metric_value(metrics, "staleness")) is not None:
        most = metric_value(metrics, "staleness_max")
        items.append(("staleness", f"{mean:.2f}" + ("" if most is None else f" (max {most:g})")))
    if (speed := metric_value(metrics, "tokens_per_second")) is not None:
        items.append(("tokens/s", f"{speed:,.0f}"))
    return items


def _evaluation_parts(report: QueueReport) -> list[str]:
    """Return the running evaluation and the last result as parts of a line."""
    if report.evaluation is None:
        return []
    now, last = report.evaluation.progress, format_result(report.evaluation.result)
    return [*([f"evaluating {now}"] if now else []), *([f"eval {last}"] if last else [])]


def _count(number: int, style: str = "") -> Text:
    return Text(f"{number:,}", style if number else _QUIET)
