"""Commands that operate a run, from any machine: dead letters, engines, pause, resume, stop."""

import getpass
import os
import socket
from typing import TYPE_CHECKING, Any, Literal

import click

from workers.cli import options
from workers.cli.command_group import log_errors_only

if TYPE_CHECKING:
    from stream.connection.run_connection import RunConnection
    from workers.runs.run import Run

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


@click.command(short_help="List a run's engines.")
@options.run
@options.json
def engines(target: str | None, as_json: bool) -> None:
    """List the engines of a run, with health and weights of each. RUN is its folder, settings file or name."""
    from workers.runs.find import open_run
    from workers.terminal.engines import list_engines

    log_errors_only("engines")
    list_engines(open_run(target), as_json=as_json)


_CONFIRMATIONS = {
    "pause": "is paused: groups in progress are finished, scored and trained; `penstock resume` continues the run",
    "resume": "continues",
    "stop": "is stopping: workers finish or release what they hold, and the trainer saves a checkpoint",
}


def send_command(command: Literal["pause", "resume", "stop"], run: "Run") -> None:
    """Send a command to a run and print the result.

    Raises:
        PenstockError: the run is not running, or the command would have no effect.
    """
    from stream.errors import PenstockError
    from stream.operator import control
    from workers.runs.find import refuse_other_run
    from workers.terminal.output import print_line

    if not run.url:
        raise PenstockError(
            f"run {run.name!r} is not running, so there is nothing to {command}; `penstock run "
            f"{run.folder}/run.toml` starts it"
        )
    operator = operator_name()

    async def send_to(connection: "RunConnection") -> bool:
        await refuse_other_run(run, connection)
        send = {"pause": control.pause, "resume": control.resume, "stop": control.stop}[command]
        return await send(connection, operator)

    has_trainer = run.call(send_to)
    note = "" if has_trainer else " (no trainer is connected at the moment)"
    print_line(f"run {run.name!r} {_CONFIRMATIONS[command]}{note}")


def operator_name() -> str:
    """Return USER@HOST, which is shown to other operators beside a command."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user id without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _control_command(name: Literal["pause", "resume", "stop"], text: str) -> click.Command:
    @click.command(name, help=text)
    @options.run
    @options.redis
    def command(target: str | None, redis: str) -> None:
        from workers.runs.find import open_run

        log_errors_only(name)
        send_command(name, open_run(target, redis, must_have_begun=True))

    return command


pause = _control_command("pause", "Start no new prompts. Groups in progress are finished, scored and trained.")
resume = _control_command("resume", "Continue a paused run.")
stop = _control_command("stop", "Stop every role after a drain and a checkpoint. `penstock run` resumes the run.")
