"""Shared by all commands: error handling, logging, the current command line, and the exit of the process."""

import os
import sys
from contextlib import suppress
from functools import cached_property
from typing import Any

import click

from workers.cli.errors import as_command_error


class CommandGroup(click.Group):
    """A click group with its commands in sections, which turns every `PenstockError` into a `CommandError`."""

    @cached_property
    def sections(self) -> dict[str, list[str]]:
        """Names of commands by title."""
        return {}

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Add commands, listed below a title in the help text."""
        for command in commands:
            self.add_command(command)
        self.sections[title] = [str(command.name) for command in commands]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section."""
        if not self.sections:
            super().format_commands(ctx, formatter)
            return
        width = max(len(name) for names in self.sections.values() for name in names)
        limit = formatter.width - 6 - width
        for title, names in self.sections.items():
            with formatter.section(title):
                rows = [(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names]
                formatter.write_dl(rows)

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
    from workers.role.log_setup import configure_logging

    configure_logging(command, level="error")


def current_command() -> tuple[str, ...]:
    """Return the command line that starts this process again, safe from packages in the working directory."""
    return (sys.executable, "-P", "-m", "penstock", *sys.argv[1:])


def exit_process(code: int) -> None:
    """Exit immediately: a normal exit would wait forever for a hanging thread of user code."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk must not replace the exit code
            stream.flush()
    os._exit(code)
