"""`warnings.jsonl` in a run's folder: what the trainer warned of while the run went on."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from stream.durable import append_all

log = structlog.get_logger()

WARNINGS_FILE: Final = "warnings.jsonl"


class TrainingWarning(Struct, frozen=True, kw_only=True):
    """One line of `warnings.jsonl`."""

    name: str
    """Name of the rule."""
    text: str
    """What is wrong, and what to look at."""
    step: int
    time: float
    """Unix time in seconds."""


def write_warnings(folder: Path, warnings: Sequence[TrainingWarning]) -> None:
    """Log warnings, and append them to `warnings.jsonl` in the run's folder. Blocks on file I/O.

    `penstock run` prints them. A full disk must not end a run for the sake of a warning.
    """
    for warning in warnings:
        log.warning("training.warning", rule=warning.name, step=warning.step, why=warning.text)
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
