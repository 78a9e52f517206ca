"""Somebody who types the commands of a page into a shell, line by line."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from tests.pages import lines_of

_ANNOUNCEMENTS = re.compile(r"^listening on (\S+)$|Ready to accept connections|^Serving HTTP", re.MULTILINE)
_ROLES = ("feed", "rollout", "score", "train")
_SERVERS = ("penstock dashboard", "penstock serve", "redis-server", "python -u -m http.server")


T = TypeVar("T")


class Background:
    """A command that was left running, with its output in a file."""

    def __init__(self, line: str, folder: Path, env: Mapping[str, str], log: Path) -> None:
        self.line = line
        self.log = log
        with log.open("wb") as out:
            command = ["sh", "-e", "-c", f"exec {line}" if re.match(r"[\w./-]+ ", line) else line]
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, what: Callable[[], T], timeout_s: float) -> T:
        """Return what a function returns as soon as it is true; the command must not end before."""
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            assert self.process.poll() is None, f"{self.line}\n{self.printed}"
            assert time.monotonic() < deadline, f"{self.line}\n{self.printed}"
            time.sleep(0.1)
        return found

    def address(self, timeout_s: float = 120) -> str:
        """Wait until a server is ready; returns the address that it printed."""
        return self.wait_until(lambda: _ANNOUNCEMENTS.search(self.printed), timeout_s)[1] or ""

    def press_ctrl_c(self, timeout_s: float = 120) -> int:
        """Interrupt the command and all that it started, as a terminal does; returns its exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(timeout_s)

    def end(self, timeout_s: float = 120) -> int:
        """Terminate the command, if it still runs; returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout_s)


class Reader:
    """A shell whose folder and variables outlast a line, and the commands that were left running."""

    def __init__(self, folder: Path, *, logs: Path, path: str = "") -> None:
        """Begin in a folder.

        Args:
            folder: where the first line is typed.
            logs: an existing folder outside of it, for the output of what is left running.
            path: put before PATH.
        """
        self.folder = folder
        self.background: list[Background] = []
        self._logs = logs
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PENSTOCK_"))}
        self.variables = {**variables, "PATH": f"{path}{os.pathsep if path else ''}{os.environ['PATH']}"}

    def type(self, text: str, timeout_s: float) -> str:
        """Run the lines of a block in order; returns what they printed. Servers and roles are left running."""
        return "".join(self.type_line(line, timeout_s) for line in lines_of(text))

    def type_line(self, line: str, timeout_s: float) -> str:
        words = line.split()
        if line.startswith(_SERVERS):
            self.leave_running(line).address()
            return ""
        if words[0] == "penstock" and words[1] in _ROLES:
            self.leave_running(line)
            return ""
        state = self._logs / "state"
        script = f"{line}\n{{ env -0; printf 'PWD=%s\\0' \"$PWD\"; }} > '{state}'"
        done = subprocess.run(
            ["sh", "-e", "-c", script],
            cwd=self.folder,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        print(f"$ {line}\n{done.stdout}")
        assert done.returncode == 0, f"{line}: exit code {done.returncode}\n{done.stdout}"
        self.variables = dict(entry.split("=", 1) for entry in state.read_text().split("\0") if entry)
        self.folder = Path(self.variables["PWD"])
        return done.stdout

    def leave_running(self, line: str) -> Background:
        """Start a command as in a terminal of its own."""
        log = self._logs / f"{len(self.background)}.log"
        self.background.append(Background(line, self.folder, self.variables, log))
        return self.background[-1]

    def leave(self) -> None:
        """End what was left running, the newest first."""
        while self.background:
            started = self.background.pop()
            started.end()
            print(f"$ {started.line}  # left running\n{started.printed}")
