"""Expected errors of commands: one line on stderr and an exit code, no traceback."""

import errno
import sys
from typing import Any, Final

import click

from workers.role.exit_codes import ExitCode

_REMEDIES: Final = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room on its disk",
    errno.EROFS: "name another folder, or mount the disk writable",
    errno.EACCES: "name another folder, or get the permission",
    errno.EPERM: "name another folder, or get the permission",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EISDIR: "a file belongs there; move the folder away",
    errno.ENOTDIR: "a folder belongs there; move the file away",
    errno.EIO: "the disk fails; name a folder on another one",
}
"""Errors of disks and permissions, with what to do. Any command may meet them, at any file."""


class CommandError(click.ClickException):
    """An expected error of a command.

    Args:
        message: what failed, where, and the remedy.
        cause: text about the exception behind it, with its traceback.
    """

    exit_code = ExitCode.FAILURE

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause

    def show(self, file: Any = None) -> None:
        """Print `error: MESSAGE` to stderr, the form that the supervisor quotes from a role's log, and the cause."""
        click.echo(f"error: {' '.join(self.message.split())}", file=file, err=file is None)
        if self.cause:
            click.echo(self.cause, file=file, err=file is None)


class SettingsCommandError(CommandError):
    """The settings or the command line are invalid; nothing was started."""

    exit_code = ExitCode.USAGE


class InterruptedCommandError(CommandError):
    """Ctrl-C ended the command."""

    exit_code = ExitCode.INTERRUPTED

    def show(self, file: Any = None) -> None:
        """Print one calm line to stderr."""
        click.echo(self.message, file=file, err=file is None)


def as_command_error(error: BaseException) -> CommandError | None:
    """Merge an error or exception group into one error; None if any part of it is not expected.

    Expected are every `PenstockError`, and errors of disks and permissions.

    Ctrl-C takes precedence over errors that its unwinding caused.
    """
    leaves = _leaf_errors(error)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return InterruptedCommandError("interrupted")
    if all(map(_disk_problem, leaves)):
        return CommandError("; ".join(dict.fromkeys(map(_disk_problem, leaves))))
    if "stream.errors" not in sys.modules:  # then no module that raises a `PenstockError` was imported
        return None
    from stream.errors import PenstockError, SettingsError

    if not all(isinstance(leaf, PenstockError) or _disk_problem(leaf) for leaf in leaves):
        return None
    kind = SettingsCommandError if any(isinstance(leaf, SettingsError) for leaf in leaves) else CommandError
    causes = [leaf.cause.render() for leaf in leaves if isinstance(leaf, PenstockError) and leaf.cause is not None]
    return kind("; ".join(dict.fromkeys(_disk_problem(leaf) or str(leaf) for leaf in leaves)), *causes[:1])


def _disk_problem(error: BaseException) -> str:
    """Return an error of a disk or a permission as text, with the remedy; empty if it is another one."""
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return ""
    return f"{error.filename or 'a file'}: {error.strerror}; {_REMEDIES[error.errno]}"


def _leaf_errors(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaf_errors(inner)]
    return [error]
