"""The logs of a run's processes: one file each, with JSON lines of Penstock and plain lines of everybody else."""

import heapq
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from stream.errors import PenstockError

_SHARED_KEYS: Final = frozenset({"event", "level", "timestamp", "role", "run", "exception"})
"""Keys that lines of most events have; the others are an event's own."""
_MAX_LINE_BYTES: Final = 1 << 20
"""A longer line is shown in parts."""
_TAIL_BYTES: Final = 1 << 18
"""How much of a file's end is read to find its last lines."""


class LogLine(Struct, frozen=True, kw_only=True):
    """One line of a log."""

    process: str
    """Whose log it is, such as `rollout-0`."""
    time: float
    """Unix time in seconds; of a plain line that of the event before it, 0 if there is none."""
    level: str = ""
    event: str = ""
    """Empty: a plain line, such as a warning of a library."""
    values: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    """A plain line, or the traceback of an event."""


def log_names(folder: Path) -> list[str]:
    """Return the names of the processes of which a run has a log, such as `rollout-0`."""
    return sorted(file.stem for file in (folder / "logs").glob("*.log"))


class RunLogs:
    """The logs of a run; each line is returned once, also of a file that is being written.

    Args:
        folder: of the run.
        role: only of this role (`rollout`), or of this process (`rollout-0`); empty: of all.

    Raises:
        PenstockError: there is no such log.
    """

    def __init__(self, folder: Path, role: str = "") -> None:
        self._folder, self._role = folder / "logs", role
        self._read: dict[Path, int] = {}
        self._times: dict[Path, float] = {}
        if not self._files():
            names = ", ".join(log_names(folder))
            which = f"of {role!r}" if role else "yet"
            raise PenstockError(f"{self._folder} has no log {which}" + (f"; it has {names}" if names else ""))

    def read_new(self) -> Iterator[LogLine]:
        """Yield the lines that were completed since the last call, of all files in the order of their times."""
        return heapq.merge(*(self._lines(file) for file in self._files()), key=lambda line: line.time)

    def last_lines(self, count: int) -> list[LogLine]:
        """Return the last lines of all files together; a large file is read from near its end."""
        for file in self._files():
            skipped = max(0, file.stat().st_size - _TAIL_BYTES)
            with file.open("rb") as opened:
                opened.seek(skipped)
                self._read[file] = skipped + (len(opened.readline()) if skipped else 0)
        return list(self.read_new())[-count:]

    def _files(self) -> list[Path]:
        files = sorted(self._folder.glob("*.log"))
        return [file for file in files if not self._role or self._role in (file.stem, file.stem.rpartition("-")[0])]

    def _lines(self, file: Path) -> Iterator[LogLine]:
        with file.open("rb") as opened:
            opened.seek(self._read.get(file, 0))
            while line := opened.readline(_MAX_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
                    return  # it is being written
                self._read[file] = opened.tell()
                shown = _parse(file.stem, line, self._times.get(file, 0.0))
                self._times[file] = shown.time
                yield shown


def _parse(process: str, line: bytes, time: float) -> LogLine:
    """Return a line; `time` is that of the line before it."""
    try:
        event = msgspec.json.decode(line, type=dict[str, Any])
        at = datetime.fromisoformat(event["timestamp"]).timestamp()
        values = {name: value for name, value in event.items() if name not in _SHARED_KEYS}
        return LogLine(
            process=process,
            time=max(at, time),
            level=str(event["level"]),
            event=str(event["event"]),
            values=values,
            text=str(event.get("exception", "")),
        )
    except (ValueError, KeyError, TypeError):
        return LogLine(process=process, time=time, text=line.decode(errors="replace").rstrip("\n"))
