"""`penstock dead`: entries that no worker of a run could finish."""

from typing import Any

import click

from workers.cli import options
from workers.cli.command_group import log_errors_only

_all_option = click.option("every", "--all", is_flag=True, help="All dead letters.")
_reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Those with this reason, or with this text in their error."
)


@click.group(short_help="List, show, retry or drop dead letters.")
def dead() -> None:
    """List, show, retry or drop entries that no worker could finish."""
    log_errors_only("dead")


def _dead_letter_options(command: Any) -> Any:
    """Add the options that these commands share."""
    ids = click.option("ids", "--id", multiple=True, metavar="ID", help="Id of a dead letter; may be repeated.")
    return options.run(ids(options.redis(options.json(command))))


@dead.command("list")
@_dead_letter_options
@_reason_option
def list_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool, reason: str) -> None:
    """List dead letters, oldest first."""
    from workers.runs.dead_letters import LetterChoice
    from workers.terminal.dead_letters import list_dead

    list_dead(_open(target, redis), LetterChoice(ids, reason), as_json=as_json)


@dead.command("show")
@_dead_letter_options
def show_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool) -> None:
    """Show dead letters with their content."""
    from workers.runs.dead_letters import LetterChoice
    from workers.terminal.dead_letters import show_dead

    show_dead(_open(target, redis), LetterChoice(ids), as_json=as_json)


@dead.command("retry")
@_dead_letter_options
@_all_option
@_reason_option
def retry_letters(
    target: str | None, ids: tuple[str, ...], redis: str, as_json: bool, every: bool, reason: str
) -> None:
    """Put dead letters back into their stages, with new retry budgets."""
    from workers.runs.dead_letters import LetterChoice
    from workers.terminal.dead_letters import retry_dead

    _require_one_choice(ids, every, reason)
    retry_dead(_open(target, redis), LetterChoice(ids, reason), as_json=as_json)


@dead.command("drop")
@_dead_letter_options
@_all_option
@_reason_option
def drop_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool, every: bool, reason: str) -> None:
    """Delete dead letters; their prompts count as dropped."""
    from workers.runs.dead_letters import LetterChoice
    from workers.terminal.dead_letters import drop_dead

    _require_one_choice(ids, every, reason)
    drop_dead(_open(target, redis), LetterChoice(ids, reason), as_json=as_json)


def _open(target: str | None, redis: str) -> Any:
    from workers.runs.find import open_run

    return open_run(target, redis, must_have_begun=True)


def _require_one_choice(ids: tuple[str, ...], every: bool, reason: str) -> None:
    """Refuse a command that names no dead letters, or names them in two ways."""
    if bool(ids) + every + bool(reason) != 1:
        raise click.UsageError("name dead letters with --id or --reason, or use --all")
