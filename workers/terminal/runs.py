"""`penstock runs`: the runs that are here, with state, step and last reward, one line each."""

from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from workers.runs.catalog import Runs
from workers.runs.state import RunState
from workers.runs.transcript import escape_controls
from workers.settings.settings import RUNS
from workers.terminal.output import make_console, print_json

_STYLES = {"running": "green", "finished": "green", "failed": "red", "killed": "red", "unreadable": "red"}


def list_runs(*, as_json: bool = False) -> None:
    """Print the runs below `runs/`, running ones first, then the newest."""
    states = Runs().states()
    if as_json:
        print_json(states)
        return
    console = make_console()
    if not states:
        console.print(f"no run below {RUNS}/ in this folder")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("run", no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("state", no_wrap=True)
    for heading in ("step", "reward"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("last step", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for state in states:
        table.add_row(*_row(state))
    console.print(table)


def _row(state: RunState) -> list[str | Text]:
    changed = f"{datetime.fromtimestamp(state.changed_at, UTC):%Y-%m-%d %H:%M:%S} UTC" if state.changed_at else "-"
    return [
        escape_controls(state.key),
        Text(state.state, _STYLES.get(state.state, "yellow")),
        f"{state.step:,}" if state.step else "-",
        "-" if state.reward is None else f"{state.reward:.3g}",
        changed,
        Text(escape_controls(state.detail).replace("\n", " "), "bright_black"),
    ]
