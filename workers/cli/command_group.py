"""Shared by all commands: error handling, logging, the current command line, and the exit of the process."""

import os
import sys
from contextlib import suppress
from typing import Any

import click

from workers.cli.command_error import as_command_error


class CommandGroup(click.Group):
    """A click group that keeps the order of its commands and turns every `PenstockError` into a `CommandError`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names in the order in which the commands were added."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an expected error becomes one line and an exit code, and Ctrl-C becomes a line, too."""
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
            expected = as_command_error(error)
            if expected is None:
                raise
            raise expected from error


def log_errors_only(command: str) -> None:
    """Log errors only, for commands whose output is a table."""
    from workers.runtime.log_setup import configure_logging

    configure_logging(command, level="error")


def current_command() -> tuple[str, ...]:
    """Return the command line that starts this process again, safe from packages in the working directory."""
    return (sys.executable, "-P", "-m", "workers", *sys.argv[1:])


def exit_process(code: int) -> None:
    """Exit immediately: a normal exit would wait forever for a hanging thread of user code."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk must not replace the exit code
            stream.flush()
    os._exit(code)
