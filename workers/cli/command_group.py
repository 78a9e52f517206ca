"""What all commands share: their log, how their errors are told, what would start them again, how they end."""

import os
import sys
from typing import Any

import click

from workers.cli.failures import as_command_error


class CommandGroup(click.Group):
    """The commands, in the order in which they were added; every error of ours becomes a `Failure`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in that order."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            known = as_command_error(error)
            if known is None:
                raise
            raise known from error


def log_errors_only(command: str) -> None:
    """For commands whose output is a table: waking a server is nothing to tell."""
    from workers.runtime import log_setup as logs

    logs.configure_logging(command, level="error")


def current_command() -> tuple[str, ...]:
    """What started this process, for others of its kind; as the supervisor starts a role, whatever lies in `.`."""
    return (sys.executable, "-P", "-m", "workers", *sys.argv[1:])


def exit_process(code: int) -> None:
    """End a role's process at once: an environment's thread that hangs would keep it for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
