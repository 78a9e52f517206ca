"""Commands on a run that there is: look at it, steer it, audit and replay it, take its model out."""

import sys
from pathlib import Path
from typing import Final, Literal

import click

from workers.cli import options
from workers.cli.command_group import current_command, log_errors_only

_ACL_ROLES: Final = ("feed", "rollout", "score", "train", "run", "operator", "viewer")


@click.command()
@options.run
@options.redis
@options.json
@click.option("--watch", is_flag=True, help="Look again every second, until the run has finished.")
def queues(target: str | None, redis: str, as_json: bool, watch: bool) -> None:
    """Show where a run's prompts are. RUN is its folder, settings file or name.

    Looking changes nothing. Without RUN: the one that goes on under runs/.
    """
    from workers.commands.queues import show_queues

    log_errors_only("queues")
    show_queues(target, redis, as_json=as_json, watch=watch)


def _control_command(name: Literal["pause", "resume", "stop"], what: str) -> click.Command:
    @click.command(name, help=what)
    @options.run
    @options.redis
    def command(target: str | None, redis: str) -> None:
        from workers.commands.control import send_command

        log_errors_only(name)
        send_command(name, target, redis)

    return command


pause = _control_command("pause", "Hand out no new prompts; what is in hand is finished, scored and trained.")
resume = _control_command("resume", "Let a paused run go on.")
stop = _control_command(
    "stop", "Let every role drain, and the trainer keep a checkpoint; `penstock run` goes on from there."
)


@click.command()
@options.run
@options.redis
@options.json
@click.option("--all", "every", is_flag=True, help="Tell of all that are lost or counted twice, not of some.")
def audit(target: str | None, redis: str, as_json: bool, every: bool) -> None:
    """Say where each prompt fed has ended; exit code 1 if any is lost or counted twice.

    RUN is its folder, settings file or name; it may go on, rest, or have ended. Looking changes nothing.
    """
    from workers.commands.audit import show_audit

    log_errors_only("audit")
    sys.exit(show_audit(target, redis, as_json=as_json, show_all=every))


@click.command()
@options.run
@options.json
def replay(target: str | None, as_json: bool) -> None:
    """Train a run's groups again, in the order of its ledger; exit code 1 if that gives other weights.

    RUN is its folder, settings file or name. The groups come from its archive (archive.keep = "all"); the weights are
    compared with its checkpoints bit for bit. Nothing of the run is changed.
    """
    from workers.commands.replay import show_replay

    log_errors_only("replay")
    sys.exit(show_replay(target, as_json=as_json, command=current_command()))


@click.command()
@click.argument("target", metavar="RUN")
@click.option(
    "roles", "--role", multiple=True, type=click.Choice(_ACL_ROLES), help="All unless given; may be repeated."
)
def acl(target: str, roles: tuple[str, ...]) -> None:
    """Print an aclfile with a user for each role of RUN, that may do its work there and nothing else.

    RUN is a folder, a settings file or a name; it need not have begun. The users have no passwords, so nobody can be
    them before you add some.
    """
    from workers.commands.acl import print_acl

    print_acl(target, roles)


@click.command()
@click.argument("run_folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--which", default="latest", show_default=True, metavar="latest|best|STEP", help="Which checkpoint.")
def export(run_folder: Path, out: Path, which: str) -> None:
    """Copy a run's trained model to OUT, in Hugging Face form."""
    if which not in {"latest", "best"} and not which.isdigit():
        raise click.UsageError(f"--which {which}: write latest, best, or the number of a step")
    from workers.runtime import log_setup as logs
    from workers.train.checkpointing.export import export

    logs.configure_logging("export")
    export(run_folder, out, int(which) if which.isdigit() else which)  # type: ignore[arg-type]
    click.echo(str(out))
