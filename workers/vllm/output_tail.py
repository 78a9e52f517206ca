"""Finds in vLLM's output why it exited: the original error, not the errors that follow from it."""

import re
from collections import deque

_PROCESS = re.compile(r"^\((?:\w+)(?: pid=\d+)?[^)]*\)\s*")
_LOGGED = re.compile(r"^(?:ERROR|CRITICAL|WARNING|INFO|DEBUG) \S+ \S+ \[[^\]]*\]\s*")
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit|Killed)\b.*:|(?:^|\s)error: ")
_CONSEQUENCES = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered an issue")
_REQUESTS = ("RequestValidationError",)
"""Errors in one client's request, which say nothing about the server."""
_DETAILS = 2
_KEPT = 400
_LONGEST = 2000


class OutputTail:
    """The last lines of a process's output."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)

    def add(self, line: bytes) -> None:
        """Append a line, without vLLM's prefixes of process and logger."""
        text = _PROCESS.sub("", line.decode(errors="replace").strip())
        text = _LOGGED.sub("", text).strip()
        if text:
            self._lines.append(text[:_LONGEST])

    @property
    def last_error(self) -> str:
        """The last error that is not a consequence of another; else the last error, else the last line."""
        lines = [*self._lines]
        errors = [
            place
            for place, line in enumerate(lines)
            if _ERROR.search(line) and not any(word in line for word in _REQUESTS)
        ]
        causes = [place for place in errors if not any(word in lines[place] for word in _CONSEQUENCES)]
        if not errors:
            return lines[-1] if lines else "it said nothing"
        place = (causes or errors)[-1]
        more = _DETAILS if "validation error" in lines[place] else 0  # pydantic puts the details below
        return " ".join(lines[place : place + 1 + more])

    @property
    def last_line(self) -> str:
        """The last line."""
        return self._lines[-1] if self._lines else ""
