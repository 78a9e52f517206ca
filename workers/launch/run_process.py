"""Starts a run from Python: `penstock run` as a child process, whose progress is printed as plain lines.

A run handles signals and has an event loop. A notebook has both already, so the run needs a process of its own.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO, Any

import msgspec

from stream import parent_death
from stream.errors import PenstockError, RunFailedError, SettingsError
from workers.launch.specs import penstock_command
from workers.role.exit_codes import ExitCode
from workers.runs.summary import RunSummary
from workers.settings import Settings
from workers.settings.toml_file import dump_settings, write_overrides

_ERROR = "error: "
_UNPRINTED_LINES = 200
"""Last lines of a quiet run that are kept: if it ends without an error line, its exception has them."""


def run(
    settings: str | Path | Settings, overrides: Mapping[str, Any] | None = None, *, quiet: bool = False
) -> RunSummary:
    """Start a run on this machine, or resume it, and wait for its end.

    The same as `penstock run`: everything is checked first, an interrupt drains and stops the run, a second one ends it
    at once, and calling this again resumes it. The run's processes end with this one.

    Args:
        settings: a settings file, the folder or name of a run, or settings.
        overrides: values of single settings, for example `{"train.max_steps": 20}`; they take precedence.
        quiet: print nothing.

    Returns:
        The final numbers of the run, also if it was interrupted: `finished` tells.

    Raises:
        SettingsError: the settings are wrong, or the check found errors; nothing was started.
        RunFailedError: the run failed, or could not go on; the message says why, `cause` where in the user's code.
        PenstockError: the run was interrupted before it began.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        if isinstance(settings, Settings):
            file = Path(folder) / f"{settings.run.name or 'run'}.toml"
            file.write_text(dump_settings(settings))
            settings = file
        words = ["run", str(settings), "--json", *(["--quiet"] if quiet else [])]
        words += [word for override in write_overrides(overrides or {}) for word in ("--set", override)]
        dying = (sys.executable, "-I", "-S", str(parent_death.__file__), str(os.getpid()))
        with subprocess.Popen(  # noqa: S603  (our own command; the file is an argument)
            [*dying, *penstock_command(), *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, encoding="utf-8", errors="replace", start_new_session=True,
        ) as child:  # fmt: skip
            code, output, errors = _communicate(child, quiet)
    return _result(code, output, errors)


def _communicate(child: subprocess.Popen[str], quiet: bool) -> tuple[int, str, list[str]]:
    """Print the child's progress until it ends, unless `quiet`. Returns its exit code, output, and error lines."""
    outputs: list[str] = []
    errors: list[str] = []
    unprinted_lines: deque[str] = deque(maxlen=_UNPRINTED_LINES)
    show: Callable[[str], object] = unprinted_lines.append if quiet else partial(print, end="", flush=True)
    readers = [
        Thread(target=lambda: outputs.extend(child.stdout or ()), daemon=True),
        Thread(target=_read_lines, args=(child.stderr, errors, show), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        _wait(child)
    finally:
        child.kill()  # it has ended, unless an exception other than two interrupts ends the wait
    for reader in readers:
        reader.join()
    code = child.wait()
    return code, "".join(outputs), errors or [f"the run ended with exit code {code}", *map(str.rstrip, unprinted_lines)]


def _wait(child: subprocess.Popen[str]) -> None:
    """Wait until the child ends, and pass two interrupts on to it: the first drains, the second ends it at once."""
    for _ in range(2):
        try:
            child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
        else:
            return
    child.wait()


def _read_lines(stream: IO[str] | None, errors: list[str], show: Callable[[str], object]) -> None:
    """Show the lines of progress, and collect those of the error with which they may end."""
    for line in stream or ():
        if line.startswith(_ERROR) or errors:
            errors.append(line.removeprefix(_ERROR).rstrip())
        else:
            show(line)


def _result(code: int, output: str, errors: list[str]) -> RunSummary:
    """Return the summary that the child printed.

    Raises:
        SettingsError: the child found faults before it started anything.
        RunFailedError: the child failed; the message has its error lines.
        PenstockError: the child was interrupted before it had a summary.
    """
    message = "\n".join(errors)
    if code == ExitCode.USAGE:
        raise SettingsError(message)
    try:
        summary = msgspec.json.decode(output, type=RunSummary)
    except ValueError:  # none was printed, or another value
        summary = None
    if code not in (ExitCode.SUCCESS, ExitCode.UNTRAINED, ExitCode.INTERRUPTED):
        failure = summary.failure if summary is not None else None
        raise RunFailedError(message, failure.cause if failure else None)
    if summary is None:
        raise PenstockError("the run was interrupted before it began")
    return summary
