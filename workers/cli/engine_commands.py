"""`penstock engines`: the engines of a running run."""

from typing import Literal

import click

from workers.cli import options
from workers.cli.command_group import log_errors_only


@click.group(short_help="List, add or remove a run's engines.")
def engines() -> None:
    """List a run's engines, add one, or remove one, while the run is running."""
    log_errors_only("engines")


@engines.command("list")
@options.run
@options.redis
@options.json
def list_engines(target: str | None, redis: str, as_json: bool) -> None:
    """List the engines that settings and operators name, and whether each is healthy."""
    from workers.runs.find import open_run
    from workers.terminal.engines import list_engines

    list_engines(open_run(target, redis, must_have_begun=True), as_json=as_json)


def _add_command(action: Literal["add", "remove"], what: str) -> None:
    @engines.command(action, help=what)
    @click.argument("url")
    @options.run
    @options.redis
    @options.json
    def command(url: str, target: str | None, redis: str, as_json: bool) -> None:
        from workers.commands.engines import change_engine

        change_engine(action, url, target, redis, as_json=as_json)


_add_command("add", "Use the engine at URL, once it has the current weights.")
_add_command("remove", "Send no more requests to the engine at URL, even if the settings name it; `add` undoes this.")
