"""Where an error came from: a small record that travels from the process that saw it to the end of the run."""

import re
from pathlib import PurePath
from typing import Final

from msgspec import Struct

MAX_TRACEBACK: Final = 3000
"""Characters of a traceback; the beginning of a longer one is cut off."""
_HEADER = "Traceback (most recent call last):"
_CRASH = "Fatal Python error: "
_CRASH_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
_CAUSED_BY = "caused by "
_GROUP_MARGIN = re.compile(r"^ *\| ")
"""What Python draws on the left of tracebacks in an exception group."""
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)')
_PLACE = re.compile(r"^(?P<before>.*) \((?P<file>.+), line (?P<line>\d+)\)$")


class ErrorCause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception in user code, or the place where user code hung."""

    exception: str
    """Type and message, for example `KeyError: 'answer'`."""
    source: str = ""
    """What was called, for example `reward function exact`, or the process that failed."""
    file: str = ""
    line: int = 0
    """Place in the user's code; empty and 0 if it is unknown."""
    traceback: str = ""
    """Python's traceback without Penstock's own frames."""

    @property
    def place(self) -> str:
        """File and line, for example `rewards.py:12`; empty if unknown."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def headline(self) -> str:
        """Source, exception and place in one line."""
        source = f"{self.source}: " if self.source else ""
        place = f" ({self.file}, line {self.line})" if self.file else ""
        return f"{source}{' '.join(self.exception.split())}{place}"

    @property
    def short_headline(self) -> str:
        """The headline with the file's name alone."""
        source = f"{self.source}: " if self.source else ""
        place = f" ({PurePath(self.file).name}, line {self.line})" if self.file else ""
        return f"{source}{' '.join(self.exception.split())}{place}"

    def render(self) -> str:
        """Return the text that ends a failed process's output; `parse_cause` reads it back."""
        return "\n".join(filter(None, [f"{_CAUSED_BY}{self.headline}", self.traceback.rstrip()]))


def parse_cause(text: str) -> ErrorCause | None:
    """Return the cause in the output of a process, after its last `error: ` line; None if it has none."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(_CAUSED_BY)]
    if not starts:
        return None
    headline = lines[starts[-1]].removeprefix(_CAUSED_BY)
    file, line = "", 0
    if found := _PLACE.match(headline):
        headline, file, line = found["before"], found["file"], int(found["line"])
    source, separator, exception = headline.partition(": ")
    return ErrorCause(
        exception=exception if separator else headline,
        source=source if separator else "",
        file=file,
        line=line,
        traceback="\n".join(_traceback_lines(lines[starts[-1] + 1 :])),
    )


def cause_from_traceback(text: str, source: str, own_folders: tuple[str, ...]) -> ErrorCause | None:
    """Return the cause in the last traceback that Python printed; None if there is none.

    Args:
        text: output of a process.
        source: name of the process.
        own_folders: folders of Penstock's packages, whose frames are left out if there are others.
    """
    lines = [_GROUP_MARGIN.sub("", line) for line in text.splitlines()]
    starts = [i for i, line in enumerate(lines) if line == _HEADER]
    if not starts:
        return None
    found = _traceback_lines(lines[starts[-1] :])
    frames: list[list[str]] = []
    for line in found[1:-1]:
        if line.startswith('  File "'):
            frames.append([])
        if frames:
            frames[-1].append(line)
    return _cause_of(found[-1], frames, source, own_folders)


def cause_from_crash(text: str, source: str, own_folders: tuple[str, ...]) -> ErrorCause | None:
    """Return the cause in the report that `faulthandler` printed last, of a crash in C; None if there is none.

    Args:
        text: output of a process.
        source: name of the process.
        own_folders: folders of Penstock's packages, whose frames are left out if there are others.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(_CRASH)]
    if not starts:
        return None
    places = [_CRASH_FRAME.match(line) for line in lines[starts[-1] + 1 :]]
    frames = [[f'  File "{each["file"]}", line {each["line"]}, in {each["name"]}'] for each in places if each]
    return _cause_of(lines[starts[-1]].removeprefix(_CRASH), frames[::-1], source, own_folders)


def _cause_of(exception: str, frames: list[list[str]], source: str, own_folders: tuple[str, ...]) -> ErrorCause:
    """Return the cause with the place of the last frame in the user's code.

    Args:
        exception: type and message.
        frames: lines of each frame, the outermost first.
        source: name of the process.
        own_folders: folders of Penstock's packages.
    """
    own = [frame for frame in frames if not any(each in frame[0] for each in own_folders)] or frames[-1:]
    outside = [frame for frame in own if "/site-packages/" not in frame[0] and "/lib/python" not in frame[0]] or own
    own = own[own.index(outside[0]) :] if outside else own  # without the threads and event loops that led to it
    place = _FRAME.match(outside[-1][0]) if outside else None
    return ErrorCause(
        exception=exception,
        source=source,
        file=place["file"] if place else "",
        line=int(place["line"]) if place else 0,
        traceback="\n".join([_HEADER, *(line for frame in own for line in frame), exception])[-MAX_TRACEBACK:],
    )


def _traceback_lines(lines: list[str]) -> list[str]:
    """Return the lines of a traceback that the text begins with."""
    if not lines or lines[0] != _HEADER:
        return []
    end = next((i for i, line in enumerate(lines[1:], 1) if not line.startswith(" ")), len(lines) - 1)
    return lines[: end + 1]
