"""Account for every prompt of a run that was fed, by its server and its files. Read-only; it creates no key."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.connection.run_identity import read_identity, read_server_identity
from stream.errors import DataError, PenstockError, ServerError
from stream.operator.audit import AuditInput, AuditReport, RunScan, audit, scan_run
from stream.trainer.ledger_records import read_ledger
from workers.datasets.mix import DatasetMix, are_known, open_dataset_mix, open_recorded_mix, recorded_lengths
from workers.datasets.prompts import PromptIndex
from workers.runs.sandboxes import audit_sandboxes
from workers.runs.summary import latest_progress
from workers.settings import Settings

_MAX_AUDITS = 4
_MAX_BROKEN_LINES_SHOWN = 5


class RunFiles(Struct, frozen=True):
    """The files of a run that an audit reads."""

    settings: Settings
    folder: Path
    dataset_mix: DatasetMix
    prompt_index: PromptIndex
    has_rows: bool = True
    """The prompt files are on this machine; otherwise only their numbers of rows are known."""
    fixed: Mapping[str, str] = {}
    """What the run knows of its rows."""

    @classmethod
    def open(cls, settings: Settings, folder: Path, server: Mapping[str, str] | None = None) -> "RunFiles":
        """Open the run's files.

        Args:
            settings: of the run.
            folder: of the run.
            server: what the server knows of the data; with what the folder knows it says how many rows the data sets
                have.

        Raises:
            PenstockError: a prompt file is missing, and the number of its rows is not known.
        """
        identity = read_identity(folder)
        fixed = (identity.fixed if identity else {}) | dict(server or {})
        try:
            dataset_mix, has_rows = open_dataset_mix(settings), True
        except DataError:  # the feeder is on another machine
            recorded = open_recorded_mix(settings, recorded_lengths(fixed))
            if recorded is None:
                raise
            dataset_mix, has_rows = recorded, False
        return cls(settings, folder, dataset_mix, PromptIndex(dataset_mix), has_rows, fixed)


async def audit_until_stable(audit_once: Callable[[], Awaitable[AuditReport]]) -> AuditReport:
    """Repeat an audit until it is clean or has the same findings twice in a row, `_MAX_AUDITS` times at most.

    In a running run, a prompt that moves between stages during the scan may seem lost.
    """
    report = await audit_once()
    for _ in range(_MAX_AUDITS - 1):
        if report.clean:
            break
        before, report = report, await audit_once()
        if _problem_prompts(before) == _problem_prompts(report):
            break
    return report


def _problem_prompts(report: AuditReport) -> tuple[set[str], ...]:
    sandboxes = set(report.sandboxes.findings) if report.sandboxes else set()
    return {each.prompt for each in report.lost}, {each.prompt for each in report.twice}, sandboxes


async def audit_on_server(settings: Settings, folder: Path, connection: RunConnection) -> AuditReport:
    """Audit a run whose server answers.

    Raises:
        PenstockError: its prompt file is missing.
    """
    fixed = (await read_server_identity(connection)).fixed
    files = await anyio.to_thread.run_sync(RunFiles.open, settings, folder, fixed)

    async def audit_once() -> AuditReport:
        try:
            scan = await scan_run(connection)
        except ServerError:
            raise
        except PenstockError as error:  # the server has no data of this run
            return await anyio.to_thread.run_sync(audit_without_server, files, str(error))
        report = await anyio.to_thread.run_sync(_audit_with_server, files, scan)
        report.sandboxes = await audit_sandboxes(settings.sandboxes, connection)
        report.clean = report.clean and not report.sandboxes.findings
        return report

    return await audit_until_stable(audit_once)


def _audit_with_server(files: RunFiles, scan: RunScan) -> AuditReport:
    """Audit with a scan of the server; checkpoint and ledger are read after the scan."""
    checkpointed = _checkpointed_ledger_bytes(files.folder)
    lines, broken = read_ledger(_ledger_path(files))
    is_own_feeder = not scan.cursor or scan.cursor.isdecimal()
    fed = {
        entry.prompt
        for entry in scan.entries
        if entry.prompt and (not is_own_feeder or entry.prompt in files.prompt_index)
    }
    if is_own_feeder:
        seen = fed | scan.unfinished | scan.dropped_dead | {line.record.prompt for line in lines}
        seen |= {letter.prompt for letter in scan.dead if letter.ends_prompt}
        before_cursor = files.prompt_index.ids_before(int(scan.cursor or 0))
        fed |= before_cursor - _rejected_ids(files, before_cursor - seen, scan.rejected_rows)
    report = audit(AuditInput(fed=fed, ledger=lines, checkpointed_bytes=checkpointed, scan=scan))
    report.notes += _ledger_notes(files, checkpointed, broken)
    if not is_own_feeder:
        report.notes.append(
            f"a custom feeder fed this run (cursor {scan.cursor!r}): prompts that left no trace cannot be missed"
        )
    if not files.has_rows and scan.rejected_rows:
        report.notes.append(
            f"the prompt files are on another machine; {scan.rejected_rows} of their rows were rejected as no prompts"
        )
    if (
        files.has_rows
        and report.lost
        and scan.data_fingerprint
        and scan.data_fingerprint != files.dataset_mix.fingerprint()
        and not are_known(files.dataset_mix.datasets, files.fixed)
    ):
        report.notes.append(
            f"{files.dataset_mix.paths} has changed since the run read it, so some prompts may be reported lost by "
            "mistake"
        )
    return report


def _rejected_ids(files: RunFiles, without_trace: set[str], rejected: int) -> set[str]:
    """Return the prompts without a trace whose rows are no prompts. Without the files, all or none of them are."""
    if files.has_rows:
        return files.prompt_index.invalid_ids(without_trace)
    return without_trace if len(without_trace) == rejected else set()


def audit_without_server(files: RunFiles, reason: str) -> AuditReport:
    """Audit with ledger, checkpoint and prompt file alone."""
    checkpointed = _checkpointed_ledger_bytes(files.folder)
    lines, broken = read_ledger(_ledger_path(files))
    report = audit(AuditInput(fed=frozenset(), ledger=lines, checkpointed_bytes=checkpointed))
    ended = {line.record.prompt for line in lines if line.record.prompt in files.prompt_index}
    report.notes.append(f"the server was not audited: {reason}")
    if unknown := files.prompt_index.total_prompts - len(ended):
        report.notes.append(
            f"{unknown} of {files.prompt_index.total_prompts} rows of {files.dataset_mix.paths} are not in the ledger; "
            "without the server it is unknown which of them were fed; a resumed run feeds them"
        )
    report.notes += _ledger_notes(files, checkpointed, broken)
    return report


def _ledger_notes(files: RunFiles, checkpointed: int | None, broken: list[str]) -> list[str]:
    """Return the problems of the ledger file."""
    path = _ledger_path(files)
    size = path.stat().st_size if path.exists() else 0
    notes = broken[:_MAX_BROKEN_LINES_SHOWN]
    if len(broken) > len(notes):
        notes.append(f"{len(broken) - len(notes)} more lines of {path} are broken")
    if checkpointed is None and size:
        notes.append("there is no checkpoint, so it is unknown whether the ledger was ever part of one")
    elif checkpointed is not None and checkpointed > size:
        notes.append(f"{path} has {size} bytes, but the latest checkpoint was saved when it had {checkpointed}")
    return notes


def _ledger_path(files: RunFiles) -> Path:
    return files.folder / "ledger.jsonl"


def _checkpointed_ledger_bytes(folder: Path) -> int | None:
    """Return the size of the ledger at the latest complete checkpoint; None if there is no checkpoint."""
    checkpoint = next((folder / "checkpoints").glob("step-*"), None)
    return latest_progress(folder).ledger_bytes if checkpoint else None
