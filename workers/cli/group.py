"""What all commands share: how they begin to log, how their errors are told, how they end."""

import os
import sys
from typing import Any

import click

from workers.failures import expected


class Commands(click.Group):
    """The commands, in the order in which they were added; every error of ours becomes a `Failure`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in that order."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            known = expected(error)
            if known is None:
                raise
            raise known from error


def log_errors_alone(command: str) -> None:
    """For commands whose output is a table: waking a server is nothing to tell."""
    from workers import logs

    logs.configure(command, level="error")


def leave(code: int) -> None:
    """End a role's process at once: an environment's thread that hangs would keep it for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
