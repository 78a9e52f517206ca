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


@click.command(short_help="List or remove sandboxes, of a run or of a place.")
@options.run
@options.redis
@options.json
@click.option("--reap", is_flag=True, help="Remove what no lease owns any more; with --place, what is listed.")
@click.option("--place", default="", metavar="PROVIDER", help="As `sandboxes.provider`: what the place itself lists.")
@click.option("--address", default="", help="As `sandboxes.address`, for --place.")
@click.option("--all-runs", is_flag=True, help="With --place: of all runs, also of those whose server is gone.")
@click.option(
    "older_than_s", "--older-than", default=0.0, metavar="SECONDS", help="With --place: begun before this time."
)
def sandboxes(
    target: str | None,
    redis: str,
    as_json: bool,
    reap: bool,
    place: str,
    address: str,
    all_runs: bool,
    older_than_s: float,
) -> None:
    """List a run's sandboxes: prompt, completion, purpose, age, and the lease that owns each.

    RUN is its folder, settings file or name; default: the only running run under runs/. --reap does one round of the
    reaper, for a run whose workers are gone.

    --place PROVIDER --all-runs asks the place itself and needs no Redis: it finds what a lost machine has left.
    """
    log_errors_only("sandboxes")
    if bool(place) != all_runs:
        raise click.UsageError("--place and --all-runs go together: a place is asked for the sandboxes of all runs")
    if place:
        _sandboxes_of_place(place, address, older_than_s, is_removing=reap, as_json=as_json)
        return
    from workers.terminal.sandboxes import show_sandboxes

    run = _open(target, redis)
    if reap:
        _reap(run)
    show_sandboxes(run, as_json=as_json)


def _sandboxes_of_place(provider: str, address: str, older_than_s: float, *, is_removing: bool, as_json: bool) -> None:
    """List the sandboxes of all runs in a place, and remove them if that is asked for."""
    import anyio

    from workers.runs.sandboxes import PlacedSandbox, list_place, remove_listed
    from workers.settings import SandboxSettings
    from workers.terminal.sandboxes import show_place

    async def ask() -> tuple[list[PlacedSandbox], dict[str, str] | None]:
        settings = SandboxSettings(provider=provider, address=address)
        listed = await list_place(settings, older_than_s)
        return listed, await remove_listed(settings, [each.name for each in listed]) if is_removing else None

    show_place(*anyio.run(ask), as_json=as_json)


def _reap(run: "Run") -> None:
    """Remove what no lease of a run owns."""
    from workers.rollout.sandbox_reaper import reap_once
    from workers.runs.find import refuse_other_run

    settings, _ = run.files("reaping the sandboxes")

    async def reap(connection: "RunConnection") -> None:
        await refuse_other_run(run, connection)
        await reap_once(settings, connection, operator_name())

    run.call(reap)


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
