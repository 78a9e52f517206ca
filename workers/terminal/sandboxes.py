"""`penstock sandboxes`: the sandboxes of a run, and whose they are; or those of all runs in one place."""

import time
from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from stream.errors import PenstockError
from stream.operator.sandboxes import LiveSandbox, SandboxScan
from stream.wording import escape_controls, format_duration, quantity
from workers.runs.run import Run
from workers.runs.sandboxes import PlacedSandbox
from workers.terminal.output import make_console, print_json

_STYLES = {"owned": "", "lost": "yellow", "due": "yellow"}


def show_sandboxes(run: Run, *, as_json: bool = False) -> None:
    """Print the sandboxes of a run that are not known to be gone, the oldest first.

    Raises:
        PenstockError: its server does not answer.
    """
    scan = run.sandboxes()
    if as_json:
        print_json({"run": run.name} | msgspec.to_builtins(scan))
        return
    console = make_console()
    if scan.live:
        console.print(_table(scan.live))
    console.print(_summary(scan), soft_wrap=True)


def _summary(scan: SandboxScan) -> str:
    counts = scan.counts
    if not counts.begun:
        return "the run has opened no sandbox"
    return (
        f"begun {counts.begun:,} = stopped {counts.stopped:,} + reaped {counts.reaped:,} + stray {counts.stray:,} + "
        f"live {len(scan.live):,}"
    )


def _table(sandboxes: Sequence[LiveSandbox]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("sandbox", "prompt", "completion", "for", "age", "lease", "owner", "place"):
        table.add_column(heading, justify="right" if heading in ("completion", "age") else "left")
    for each in sandboxes:
        table.add_row(
            each.name,
            escape_controls(each.prompt),
            str(each.completion),
            each.purpose,
            format_duration(each.age_s),
            Text(lease_text(each), _STYLES[each.state]),
            escape_controls(each.owner),
            f"{each.provider} {each.place}",
        )
    return table


def lease_text(sandbox: LiveSandbox) -> str:
    """Return whether a lease owns a sandbox, and until when unless it is renewed."""
    if sandbox.state == "due":
        return "being removed"
    if sandbox.state == "lost":
        return f"lost {format_duration(-sandbox.lease_s)} ago"
    return f"{format_duration(sandbox.lease_s)} left"


def show_place(
    sandboxes: Sequence[PlacedSandbox], problems: Mapping[str, str] | None = None, *, as_json: bool = False
) -> None:
    """Print the sandboxes of all runs in one place.

    Args:
        sandboxes: what it has.
        problems: after they were removed: why some were not, by name; None: nothing was removed.
        as_json: print one JSON object.

    Raises:
        PenstockError: some could not be removed.
    """
    if as_json:
        print_json({"sandboxes": sandboxes, "removed": problems is not None, "problems": dict(problems or {})})
    else:
        console = make_console()
        if sandboxes:
            console.print(_place_table(sandboxes))
        removed = "" if problems is None else f", {len(sandboxes) - len(problems):,} removed"
        console.print(f"{quantity(len(sandboxes), 'sandbox')}{removed}", soft_wrap=True)
    if problems:
        raise PenstockError("; ".join(f"{name}: {why}" for name, why in problems.items()))


def _place_table(sandboxes: Sequence[PlacedSandbox]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("sandbox", "run", "age", "state"):
        table.add_column(heading, justify="right" if heading == "age" else "left")
    now = time.time()
    for each in sandboxes:
        age = format_duration(now - each.begun) if each.begun else "unknown"
        table.add_row(each.name, each.run_id[:8], age, "snapshot" if each.snapshot else each.state)
    return table
