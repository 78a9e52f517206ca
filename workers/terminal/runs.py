"""`penstock runs` lists the runs that are here, one line each; `penstock logs` shows what their processes log."""

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stream.errors import PenstockError
from stream.wording import escape_controls
from workers.runs.catalog import Runs
from workers.runs.export import encode_json
from workers.runs.live_run import read_live
from workers.runs.logs import LogLine, RunLogs
from workers.runs.run import Run
from workers.runs.state import RunState
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


_FOLLOW_INTERVAL_S: Final = 0.5
_LEVEL_STYLES: Final = {"debug": "bright_black", "warning": "yellow", "error": "bold red", "critical": "bold red"}


def show_logs(run: Run, role: str = "", *, follow: bool = False) -> None:
    """Print the logs of a run, or of one role.

    Args:
        run: the run.
        role: such as `rollout`, or a process such as `rollout-0`; empty: all.
        follow: print what is added, until the run has ended or Ctrl-C is pressed.

    Raises:
        PenstockError: only the run's server is known, or there is no such log.
    """
    if run.folder is None:
        raise PenstockError(f"the logs of run {run.name!r} are in its folder: give that instead")
    logs = RunLogs(run.folder, role)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    with suppress(KeyboardInterrupt):  # how one stops to follow
        is_running = True
        while is_running:
            is_running = follow and read_live(run.folder) is not None  # before the last lines are read
            for line in logs.read_new():
                console.print(render_line(line))
            if is_running:
                time.sleep(_FOLLOW_INTERVAL_S)


def render_line(line: LogLine) -> Text:
    """Return a line with time, process and event; a traceback follows on lines of its own."""
    at = f"{datetime.fromtimestamp(line.time, UTC):%Y-%m-%d %H:%M:%S} " if line.time else ""
    text = Text.assemble((at, "bright_black"), (f"{escape_controls(line.process):<12} ", "cyan"))
    if not line.event:
        return text.append(escape_controls(line.text))
    text.append(escape_controls(line.event), _LEVEL_STYLES.get(line.level, "bold"))
    for name, value in line.values.items():
        text.append(f"  {escape_controls(name)}=", "bright_black")
        text.append(escape_controls(value if isinstance(value, str) else encode_json(value).decode()))
    for further in escape_controls(line.text).splitlines():
        text.append(f"\n    {further}", "bright_black")
    return text
