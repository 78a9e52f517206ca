"""`penstock audit`: where each prompt fed has ended. Looking changes nothing, and creates no key."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError, ServerError
from stream.operator.audit import AuditInput, AuditReport, audit
from stream.operator.run_scan import RunScan, scan_run
from stream.trainer.ledger import read_ledger
from workers.commands.prompt_index import PromptIndex
from workers.feed.dataset_mix import DatasetMix, open_dataset_mix
from workers.run.run_info import RunLocation, find_run, with_run
from workers.run.summary import latest_progress
from workers.settings import Settings
from workers.settings.toml_file import load_settings

_MAX_FINDINGS_SHOWN = 20
"""Told without `--all`."""
_MAX_AUDITS = 4
_MAX_BROKEN_LINES_SHOWN = 5


class RunFiles(Struct, frozen=True):
    """What lies in files: enough to audit by, together with a census of the server."""

    settings: Settings
    folder: Path
    dataset_mix: DatasetMix
    prompt_index: PromptIndex


def show_audit(target: str | None, redis: str, *, as_json: bool = False, show_all: bool = False) -> int:
    """Print where each prompt fed has ended. Returns the exit code: 1 if any is lost, or counted twice.

    Raises:
        PenstockError: no such run, or its prompt file is gone.
    """
    place = find_run(target, redis, must_have_begun=False)
    report = audit_run(place)
    if as_json:
        told = {"run": place.run} | msgspec.to_builtins(report)
        print(msgspec.json.encode(told).decode(), flush=True)  # noqa: T201  (this is the command's output)
    else:
        _print_report(place.run, report, show_all)
    return 0 if report.clean else 1


def audit_run(place: RunLocation) -> AuditReport:
    """Audit a run that goes on, rests, or has ended; from its files alone where there is no server.

    Raises:
        PenstockError: nothing of it is there, or its prompt file is gone.
    """
    files = _read_run_files(place)
    if not place.url and not (files.folder / "redis").is_dir():
        return _audit_without_server(files, f"{files.folder / 'redis'} is not there")
    try:
        return with_run(place, partial(_audit_on_server, files))
    except ServerError as error:
        return _audit_without_server(files, str(error))


async def audit_until_stable(audit_once: Callable[[], Awaitable[AuditReport]]) -> AuditReport:
    """Look again where something is wrong: in a run that goes on a prompt may move back while it is looked for.

    What is wrong must be wrong in two looks, one after the other.
    """
    report = await audit_once()
    for _ in range(_MAX_AUDITS - 1):
        if report.clean:
            break
        before, report = report, await audit_once()
        if _problem_prompts(before) == _problem_prompts(report):
            break
    return report


def _problem_prompts(report: AuditReport) -> tuple[set[str], set[str]]:
    return {each.prompt for each in report.lost}, {each.prompt for each in report.twice}


async def _audit_on_server(files: RunFiles, connection: RunConnection) -> AuditReport:
    async def audit_once() -> AuditReport:
        try:
            census = await scan_run(connection)
        except ServerError:
            raise
        except PenstockError as error:  # it was emptied
            return await anyio.to_thread.run_sync(_audit_without_server, files, str(error))
        return await anyio.to_thread.run_sync(_audit_with_server, files, census)

    return await audit_until_stable(audit_once)


def _read_run_files(place: RunLocation) -> RunFiles:
    if place.folder is None or place.settings is None:
        raise PenstockError(f"an audit of run {place.run!r} reads its ledger: name its folder, or its settings file")
    kept = place.folder / "run.toml"
    settings = load_settings(kept) if kept.is_file() else place.settings
    if not place.url and not any((place.folder / name).exists() for name in ("redis", "ledger.jsonl")):
        raise PenstockError(f"the run in {place.folder} has not begun: there is neither a server nor a ledger")
    mixture = open_dataset_mix(settings)
    return RunFiles(settings, place.folder, mixture, PromptIndex(mixture))


def _audit_with_server(files: RunFiles, census: RunScan) -> AuditReport:
    """Audit by a server's census, and by checkpoint and ledger as they are after it."""
    checkpointed = _checkpointed_ledger_bytes(files.folder)
    lines, broken = read_ledger(_ledger_path(files))
    is_own_feeder = not census.cursor or census.cursor.isdecimal()
    fed = {
        entry.prompt
        for entry in census.entries
        if entry.prompt and (not is_own_feeder or entry.prompt in files.prompt_index)
    }
    if is_own_feeder:
        seen = fed | census.unfinished | census.dropped_dead | {written.record.prompt for written in lines}
        seen |= {letter.prompt for letter in census.dead if letter.ends_prompt}
        passed = files.prompt_index.ids_before(int(census.cursor or 0))
        fed |= passed - files.prompt_index.invalid_ids(passed - seen)
    report = audit(AuditInput(fed=fed, ledger=lines, checkpointed_bytes=checkpointed, scan=census))
    report.notes += _ledger_notes(files, checkpointed, broken)
    if not is_own_feeder:
        report.notes.append(
            f"another feeder than ours fed it (cursor {census.cursor!r}): what left no trace is not missed"
        )
    if report.lost and census.data_fingerprint and census.data_fingerprint != files.dataset_mix.fingerprint():
        report.notes.append(
            f"{files.dataset_mix.paths} has changed since it was fed, so some may be called lost that are not"
        )
    return report


def _audit_without_server(files: RunFiles, reason: str) -> AuditReport:
    """Audit by ledger, checkpoint and prompt file alone."""
    checkpointed = _checkpointed_ledger_bytes(files.folder)
    lines, broken = read_ledger(_ledger_path(files))
    report = audit(AuditInput(fed=frozenset(), ledger=lines, checkpointed_bytes=checkpointed))
    ended = {written.record.prompt for written in lines if written.record.prompt in files.prompt_index}
    report.notes.append(f"the server was not audited: {reason}")
    if unknown := files.prompt_index.total_prompts - len(ended):
        report.notes.append(
            f"{unknown} of {files.prompt_index.total_prompts} rows of {files.dataset_mix.paths} have no end in the ledger: without "
            "the server nobody knows which of them were fed; a run that goes on feeds them"
        )
    report.notes += _ledger_notes(files, checkpointed, broken)
    return report


def _ledger_notes(files: RunFiles, checkpointed: int | None, broken: list[str]) -> list[str]:
    """What is odd about the ledger."""
    path = _ledger_path(files)
    size = path.stat().st_size if path.exists() else 0
    notes = broken[:_MAX_BROKEN_LINES_SHOWN]
    if len(broken) > len(notes):
        notes.append(f"{len(broken) - len(notes)} more lines of {path} are broken")
    if checkpointed is None and size:
        notes.append("there is no checkpoint: whether one ever held what is in the ledger is not known")
    elif checkpointed is not None and checkpointed > size:
        notes.append(f"{path} has {size} bytes, but the newest checkpoint was made when it had {checkpointed}")
    return notes


def _ledger_path(files: RunFiles) -> Path:
    return files.folder / "ledger.jsonl"


def _checkpointed_ledger_bytes(folder: Path) -> int | None:
    """Bytes of the ledger that the newest whole checkpoint holds; None where there never was a checkpoint."""
    there = next((folder / "checkpoints").glob("step-*"), None)
    return latest_progress(folder).ledger_bytes if there else None


def _print_report(run: str, report: AuditReport, show_all: bool) -> None:
    """The report for people."""
    console = Console(highlight=False, markup=False)
    console.print(f"{run}   {report.fed:,} prompts fed", soft_wrap=True)
    console.print(_table(report))
    for title, found in (("lost", report.lost), ("counted twice", report.twice)):
        told = found if show_all else found[:_MAX_FINDINGS_SHOWN]
        for each in told:
            console.print(f"{title}: {each.prompt}", style="red", soft_wrap=True)
            for fact in each.evidence:
                console.print(f"    {fact}", soft_wrap=True)
        if len(told) < len(found):
            console.print(f"and {len(found) - len(told):,} more {title}; --all tells all", soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    console.print(verdict(report), style="green" if report.clean else "red", soft_wrap=True)


def verdict(report: AuditReport) -> str:
    """One line that says whether it is clean."""
    if report.clean:
        return "clean: nothing is lost, nothing is counted twice"
    return f"not clean: {len(report.lost):,} lost, {len(report.twice):,} counted twice"


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
        ("twice", len(report.twice)),
    ]
    for name, n in rows:
        table.add_row(name, f"{n:,}")
    if report.unsaved:
        table.add_row("(ended, but in no checkpoint yet)", f"{report.unsaved:,}", style="bright_black")
    if report.junk:
        table.add_row("(junk beside them)", f"{report.junk:,}", style="bright_black")
    return table
