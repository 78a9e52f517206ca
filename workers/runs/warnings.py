"""What went wrong while a run went on: `warnings.jsonl` of its trainer, and what its supervisor logged of processes."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import Struct, structs

from stream.durable import append_all
from stream.errors import PenstockError
from workers.runs.logs import RunLogs

log = structlog.get_logger()

WARNINGS_FILE: Final = "warnings.jsonl"
_INCIDENTS: Final = {
    "role.restarted": "restarted",
    "worker.recycled": "replaced",
    "worker.died": "died",
    "role.killed": "killed",
    "role.hanging": "hangs",
    "run.restored": "restored from object storage",
    "disk.full": "disk is full",
}
"""Events of the supervisor's log, in words."""


class TrainingWarning(Struct, frozen=True, kw_only=True):
    """One line of `warnings.jsonl`."""

    name: str
    """Name of the rule."""
    text: str
    """What is wrong, and what to look at."""
    step: int
    time: float
    """Unix time in seconds."""
    is_note: bool = False
    """Nothing is wrong: it says what the run does."""


def write_warnings(folder: Path, warnings: Sequence[TrainingWarning]) -> None:
    """Log warnings, and append them to `warnings.jsonl` in the run's folder. Blocks on file I/O.

    `penstock run` prints them. A full disk must not end a run for the sake of a warning.
    """
    for warning in warnings:
        log.warning("training.warning", rule=warning.name, step=warning.step, why=warning.text)
    _append(folder, warnings)


def write_note(folder: Path, note: TrainingWarning) -> None:
    """Append to `warnings.jsonl` what `penstock run` prints, though nothing is wrong. Blocks on file I/O."""
    _append(folder, [structs.replace(note, is_note=True)])


def _append(folder: Path, warnings: Sequence[TrainingWarning]) -> None:
    with suppress(OSError), (folder / WARNINGS_FILE).open("ab", buffering=0) as file:
        append_all(file, *(msgspec.json.encode(warning) + b"\n" for warning in warnings))


def warnings_size(folder: Path) -> int:
    """Return the length of a run's `warnings.jsonl`; 0 if there is none."""
    try:
        return (folder / WARNINGS_FILE).stat().st_size
    except OSError:
        return 0


def read_warnings(folder: Path, start: int) -> tuple[list[TrainingWarning], int]:
    """Return the warnings after byte `start` of a run's file, and its length. Blocks on file I/O."""
    try:
        with (folder / WARNINGS_FILE).open("rb") as file:
            file.seek(start)
            whole = file.read().rpartition(b"\n")[0]
    except OSError:  # no warning yet
        return [], start
    if not whole:
        return [], start
    found = []
    for line in whole.split(b"\n"):
        with suppress(ValueError):  # a damaged line
            found.append(msgspec.json.decode(line, type=TrainingWarning))
    return found, start + len(whole) + 1


class Incident(Struct, frozen=True, kw_only=True):
    """A warning of the trainer, or what happened to a process."""

    time: float
    """Unix time in seconds."""
    what: str
    """Rule of the warning, or process and event in words."""
    text: str


def read_incidents(folder: Path, count: int) -> list[Incident]:
    """Return the last warnings, restarts and deaths of processes of a run, the newest first. Blocks on file I/O."""
    warnings, _ = read_warnings(folder, 0)
    found = [
        Incident(time=each.time, what=f"{each.name} at step {each.step}", text=each.text)
        for each in warnings
        if not each.is_note
    ]
    with suppress(PenstockError):  # there is no such log yet
        for line in RunLogs(folder, "supervisor").read_new():
            if word := _INCIDENTS.get(line.event):
                facts = {name: value for name, value in line.values.items() if name != "name"}
                text = ", ".join(f"{name} {value}" for name, value in facts.items() if value not in (None, "", []))
                found.append(Incident(time=line.time, what=f"{line.values.get('name', '')} {word}".strip(), text=text))
    return sorted(found, key=lambda incident: -incident.time)[:count]
