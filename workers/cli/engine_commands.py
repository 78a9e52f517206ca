"""`penstock engines`: the engines of a run, while it goes on."""

from typing import Literal

import click

from workers.cli import options
from workers.cli.command_group import log_errors_only


@click.group()
def engines() -> None:
    """Show a run's engines, add one, or remove one, while it goes on."""
    log_errors_only("engines")


@engines.command("list")
@options.run
@options.redis
@options.json
def list_engines(target: str | None, redis: str, as_json: bool) -> None:
    """List the engines that settings and operators name, and whether each answers."""
    from workers.commands.engines import list_engines

    list_engines(target, redis, as_json=as_json)


def _add_command(action: Literal["add", "remove"], what: str) -> None:
    @engines.command(action, help=what)
    @click.argument("url")
    @options.run
    @options.redis
    @options.json
    def command(url: str, target: str | None, redis: str, as_json: bool) -> None:
        from workers.commands.engines import change_engine

        change_engine(action, url, target, redis, as_json=as_json)


_add_command("add", "Let the run use the engine at URL, once it has the current weights.")
_add_command("remove", "Give the engine at URL nothing more to do, whoever names it; `add` undoes that.")
