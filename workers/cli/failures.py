"""Errors that were to be expected, as a command tells them: one clear line and an exit code, no traceback."""

import sys
from typing import Any

import click


class CommandError(click.ClickException):
    """An error that was to be expected: one clear line and an exit code, no traceback."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Write it to stderr, in the form that the supervisor quotes from a role's log."""
        click.echo(f"error: {' '.join(self.message.split())}", file=file, err=file is None)


class SettingsCommandError(CommandError):
    """The settings are at fault, and nothing was started."""

    exit_code = 2


def as_command_error(error: BaseException) -> CommandError | None:
    """The errors of ours in what was raised, as one line; None if there is anything else among them."""
    if "stream.errors" not in sys.modules:  # nothing that could raise one was imported
        return None
    from stream.errors import PenstockError, SettingsError

    leaves = _leaf_errors(error)
    if not all(isinstance(leaf, PenstockError) for leaf in leaves):
        return None
    kind = SettingsCommandError if any(isinstance(leaf, SettingsError) for leaf in leaves) else CommandError
    return kind("; ".join(dict.fromkeys(str(leaf) for leaf in leaves)))


def _leaf_errors(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaf_errors(inner)]
    return [error]
