"""`penstock dead`: what no worker of a run could finish."""

from typing import Any

import click

from workers.cli import options
from workers.cli.command_group import log_errors_only

_all_option = click.option("every", "--all", is_flag=True, help="All of them.")


@click.group()
def dead() -> None:
    """Show, retry or drop what no worker could finish."""
    log_errors_only("dead")


def _dead_letter_options(command: Any) -> Any:
    """What the commands on dead letters have in common."""
    ids = click.option("ids", "--id", multiple=True, metavar="ID", help="A letter's id; may be repeated.")
    return options.run(ids(options.redis(options.json(command))))


@dead.command("list")
@_dead_letter_options
def list_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool) -> None:
    """List dead letters, oldest first."""
    from workers.commands.dead_letters import list_dead

    list_dead(target, redis, ids, as_json=as_json)


@dead.command("show")
@_dead_letter_options
def show_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool) -> None:
    """Show dead letters with what is in them."""
    from workers.commands.dead_letters import show_dead

    show_dead(target, redis, ids, as_json=as_json)


@dead.command("retry")
@_dead_letter_options
@_all_option
def retry_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool, every: bool) -> None:
    """Put dead letters back where they came from, with fresh budgets."""
    from workers.commands.dead_letters import retry_dead

    retry_dead(target, redis, _selected_ids(ids, every), as_json=as_json)


@dead.command("drop")
@_dead_letter_options
@_all_option
def drop_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool, every: bool) -> None:
    """Delete dead letters for good; their prompts count as dropped."""
    from workers.commands.dead_letters import drop_dead

    drop_dead(target, redis, _selected_ids(ids, every), as_json=as_json)


def _selected_ids(ids: tuple[str, ...], every: bool) -> tuple[str, ...]:
    """The ids that were named; none means all, which has to be said."""
    if bool(ids) == every:
        raise click.UsageError("name letters by --id, or take them all with --all")
    return ids
