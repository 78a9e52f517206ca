"""`penstock engines list`: the engines of a run as a table."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from workers.runs.engines import EngineReport
from workers.runs.run import Run
from workers.terminal.output import make_console, print_json


def list_engines(run: Run, *, as_json: bool = False) -> None:
    """Print the engines of a run and whether each answers.

    Raises:
        PenstockError: its server does not answer.
    """
    reports = run.engines()
    if as_json:
        print_json(reports)
    elif reports:
        make_console().print(_table(reports))
    else:
        make_console().print("no engines: neither the settings nor `penstock engines add` name one")


def _table(reports: Sequence[EngineReport]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("engine", "named by", "weights", ""):
        table.add_column(heading)
    for report in reports:
        if report.removed:
            state = Text(f"removed by {report.changed_by} at {_format_time(report.changed_at)}", "yellow")
        elif report.healthy:
            state = Text("healthy", "green")
        else:
            state = Text(f"does not answer: {report.error}", "red")
        version = "-" if report.policy_version is None else f"v{report.policy_version}"
        named_by = report.changed_by if report.source == "operator" else report.source
        table.add_row(report.url, named_by, version, state)
    return table


def _format_time(at: float | None) -> str:
    return f"{datetime.fromtimestamp(at or 0.0, UTC):%Y-%m-%d %H:%M:%S} UTC"
