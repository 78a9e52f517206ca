"""`penstock replay`: a run done again from ledger and archive, and compared with its checkpoints bit for bit."""

from pathlib import Path

import msgspec

from stream.errors import PenstockError
from workers.run.live import locate
from workers.settings.file import load
from workers.train.keeping.agreement import Agreement, Difference
from workers.train.keeping.replay import ReplayReport, replay


def show_replay(target: str | None, *, as_json: bool = False) -> int:
    """Do a run again and print where it agrees. Returns the exit code: 1 where it came out otherwise.

    Raises:
        PenstockError: no such run, or it cannot be done again: groups are missing, or were altered.
    """
    place = locate(target, begun=False)
    if place.folder is None or place.settings is None:
        raise PenstockError(f"a replay of run {place.run!r} reads its files: name its folder, or its settings file")
    kept = place.folder / "run.toml"
    settings = load(kept) if kept.is_file() else place.settings
    report = replay(settings, place.folder, _quiet if as_json else _tell)
    if as_json:
        _print(msgspec.json.encode({"run": place.run} | msgspec.to_builtins(report)).decode())
    else:
        _show(report, kept)
    return 0 if report.equal else 1


def _show(report: ReplayReport, kept: Path) -> None:
    """The end of the report for people."""
    for note in report.notes:
        _print(f"note: {note}")
    if report.difference is None:
        _print(f"equal bit for bit after {report.steps:,} steps: {report.groups:,} groups, {report.dropped:,} dropped")
    else:
        _print(f"different: {_told(report.difference)}")
        _print(f"(done with {kept} as it is now: where [train] was changed between, this is no wonder)")


def _told(difference: Difference) -> str:
    where = f"{difference.checkpoint}: " if difference.checkpoint else ""
    return f"step {difference.step}: {where}{difference.what}"


def _tell(agreement: Agreement) -> None:
    _print(f"step {agreement.step}: {agreement.checkpoint} is equal ({agreement.tensors} tensors)")


def _quiet(_: Agreement) -> None:
    """In JSON all of them come at once."""


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201  (this is the command's output)
