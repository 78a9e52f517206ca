"""`penstock engines`: the engines of a run as a table."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from stream.wording import format_bytes
from workers.runs.engines import EngineReport
from workers.runs.run import Run
from workers.terminal.output import make_console, print_json


def list_engines(run: Run, *, as_json: bool = False) -> None:
    """Print the engines of a run and whether each answers.

    Raises:
        PenstockError: the run has no settings that can be read.
    """
    reports = run.engines()
    if as_json:
        print_json(reports)
    elif reports:
        make_console().print(_table(reports))
    else:
        make_console().print("no engines: engine.urls is empty, and no engine of `penstock run` is running")


def _table(reports: Sequence[EngineReport]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("engine", "named by", "weights", "cache", ""):
        table.add_column(heading)
    for report in reports:
        state = Text("healthy", "green") if report.healthy else Text(f"does not answer: {report.error}", "red")
        version = "-" if report.policy_version is None else f"v{report.policy_version}"
        table.add_row(report.url, report.source, version, _cache_text(report), state)
    return table


def _cache_text(report: EngineReport) -> str:
    """Return what the keys and values take, of what they may."""
    if report.cache_bytes is None or report.max_cache_bytes is None:
        return "-"
    return f"{format_bytes(report.cache_bytes)} of {format_bytes(report.max_cache_bytes)}"
