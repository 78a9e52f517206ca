"""`penstock audit`: the account of a run's prompts as a table, with what is lost or counted twice."""

from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from stream.operator.audit import AuditReport, TurnCounts
from stream.operator.sandboxes import SandboxAccount
from stream.wording import format_counts, quantity
from workers.runs.run import Run
from workers.terminal.output import print_json

_MAX_FINDINGS_SHOWN: Final = 20
"""Largest number of findings of each kind (lost, counted twice) that are printed without `--all`."""


def show_audit(run: Run, *, as_json: bool = False, show_all: bool = False) -> bool:
    """Audit a run and print the report. Returns whether no prompt is lost or counted twice.

    Raises:
        PenstockError: the run has not begun, or its prompt file is missing.
    """
    report = run.audit()
    if as_json:
        print_json({"run": run.name} | msgspec.to_builtins(report))
    else:
        _print_report(run.name, report, show_all)
    return report.clean


def _print_report(run: str, report: AuditReport, show_all: bool) -> None:
    console = Console(highlight=False, markup=False)
    console.print(f"{run}   {report.fed:,} prompts fed", soft_wrap=True)
    console.print(_table(report))
    if report.turns.sampled:
        console.print(_turns(report.turns), soft_wrap=True)
    if report.sandboxes is not None and report.sandboxes.begun:
        _print_sandboxes(console, report.sandboxes)
    for title, found in (("lost", report.lost), ("counted twice", report.twice)):
        shown = found if show_all else found[:_MAX_FINDINGS_SHOWN]
        for each in shown:
            console.print(f"{title}: {each.prompt}", style="red", soft_wrap=True)
            for line in each.evidence:
                console.print(f"    {line}", soft_wrap=True)
        if len(shown) < len(found):
            console.print(f"and {len(found) - len(shown):,} more {title}; --all shows all", soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    console.print(verdict(report), style="green" if report.clean else "red", soft_wrap=True)


def _print_sandboxes(console: Console, account: SandboxAccount) -> None:
    adopted = f" (adopted {account.adopted:,} times)" if account.adopted else ""
    console.print(f"{account}{adopted}", soft_wrap=True)
    for finding in account.findings:
        console.print(f"sandboxes: {finding}", style="red", soft_wrap=True)
    for note in account.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)


def verdict(report: AuditReport) -> str:
    """Return the result of the audit as one line."""
    if report.clean:
        return "clean: no prompt is lost or counted twice"
    turns = report.turns
    missing = turns.sampled - turns.kept - turns.again - turns.unfinished
    of_turns = f"; {missing:,} sampled turns are unaccounted for" if missing else ""
    findings = len(report.sandboxes.findings) if report.sandboxes else 0
    of_sandboxes = f"; {quantity(findings, 'finding')} about sandboxes" if findings else ""
    return f"not clean: {len(report.lost):,} lost, {len(report.twice):,} counted twice{of_turns}{of_sandboxes}"


def _turns(turns: TurnCounts) -> str:
    resumed = format_counts(turns.resumed)
    parts = f"kept {turns.kept:,} + again {turns.again:,} + unfinished {turns.unfinished:,}"
    return f"turns: sampled {turns.sampled:,} = {parts}{f'   completions resumed: {resumed}' if resumed else ''}"


def _table(report: AuditReport) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    rows = [
        ("trained", report.trained),
        *((f"dropped: {reason}", n) for reason, n in report.dropped.items()),
        ("dead", report.dead),
        *((f"outstanding: {stage}", n) for stage, n in report.outstanding.items()),
        ("lost", len(report.lost)),
        ("counted twice", len(report.twice)),
    ]
    for name, n in rows:
        table.add_row(name, f"{n:,}")
    if report.unsaved:
        table.add_row("(ended, in no checkpoint yet)", f"{report.unsaved:,}", style="bright_black")
    if report.foreign_entries:
        table.add_row("(entries that are not prompts of this run)", f"{report.foreign_entries:,}", style="bright_black")
    return table
