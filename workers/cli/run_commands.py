"""Commands on an existing run: status, control, audit, replay, users, export."""

import sys
from pathlib import Path
from typing import Literal

import click

from workers.cli import options
from workers.cli.command_group import current_command, log_errors_only


@click.command(short_help="Show where a run's prompts are, or what is in flight.")
@options.run
@options.redis
@options.json
@click.option("--in-flight", is_flag=True, help="What each completion is doing now, the longest unchanged first.")
@click.option("--watch", is_flag=True, help="On the whole terminal, until the run has finished; Ctrl-C ends it.")
@click.option("count", "-n", default=40, show_default=True, type=click.IntRange(1), help="Lines of --in-flight.")
@click.option(
    "stuck_s", "--stuck", default=60.0, show_default=True, metavar="SECONDS", help="Mark what is unchanged for longer."
)
def queues(
    target: str | None, redis: str, as_json: bool, in_flight: bool, watch: bool, count: int, stuck_s: float
) -> None:
    """Show where a run's prompts are, and with --in-flight what each completion is doing.

    RUN is its folder, settings file or name; default: the only running run under runs/. Read-only.

    --watch shows both, live, and waits for a run that is about to start. Without a terminal, or with --json, it prints
    a JSON object per second.
    """
    from workers.runs.find import open_run
    from workers.terminal import queues

    log_errors_only("queues")
    if watch:
        queues.watch(target, redis, in_flight=in_flight, stuck_s=stuck_s, as_json=as_json)
        return
    run = open_run(target, redis, must_have_begun=True)
    if in_flight:
        queues.show_in_flight(run, count=count, stuck_s=stuck_s, as_json=as_json)
    else:
        queues.show_queues(run, as_json=as_json)


@click.command(short_help="List runs with state, step and last reward.")
@options.json
def runs(as_json: bool) -> None:
    """List the runs below runs/, running ones first, then the newest. Read-only."""
    from workers.terminal.runs import list_runs

    log_errors_only("runs")
    list_runs(as_json=as_json)


@click.command(short_help="Show the log of a role.")
@click.argument("target", metavar="RUN")
@click.argument("role", required=False, default="")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is added, until the run has ended.")
def logs(target: str, role: str, follow: bool) -> None:
    """Show what a run's processes logged, as people read it. RUN is its folder, settings file or name.

    ROLE is a role such as rollout, or a process such as rollout-0 or supervisor; default: all, in the order of time.
    """
    from workers.runs.find import open_run
    from workers.terminal.runs import show_logs

    log_errors_only("logs")
    show_logs(open_run(target), role, follow=follow)


def _control_command(name: Literal["pause", "resume", "stop"], text: str) -> click.Command:
    @click.command(name, help=text)
    @options.run
    @options.redis
    def command(target: str | None, redis: str) -> None:
        from workers.commands.control import send_command
        from workers.runs.find import open_run

        log_errors_only(name)
        send_command(name, open_run(target, redis, must_have_begun=True))

    return command


pause = _control_command("pause", "Start no new prompts. Groups in progress are finished, scored and trained.")
resume = _control_command("resume", "Continue a paused run.")
stop = _control_command("stop", "Stop every role after a drain and a checkpoint. `penstock run` resumes the run.")


@click.command(short_help="Account for every prompt that was fed.")
@options.run
@options.redis
@options.json
@click.option("--all", "show_all", is_flag=True, help="Show all findings, not only the first ones.")
def audit(target: str | None, redis: str, as_json: bool, show_all: bool) -> None:
    """Account for every prompt that was fed; exit code 1 if any is lost or counted twice.

    RUN is its folder, settings file or name; it may be running, stopped or finished. Read-only.
    """
    from workers.runs.find import open_run
    from workers.terminal.audit import show_audit

    log_errors_only("audit")
    sys.exit(0 if show_audit(open_run(target, redis), as_json=as_json, show_all=show_all) else 1)


@click.command(short_help="Train a run's groups again and compare the weights.")
@options.run
@options.json
def replay(target: str | None, as_json: bool) -> None:
    """Train a run's groups again in the order of its ledger; exit code 1 if the weights differ.

    RUN is its folder, settings file or name. The groups come from its archive (archive.keep = "all"); the weights are
    compared with its checkpoints bit for bit. The run is not changed.
    """
    from workers.evaluate.replay import show_replay
    from workers.runs.find import open_run

    log_errors_only("replay")
    sys.exit(show_replay(open_run(target), as_json=as_json, command=current_command()))


@click.command()
@click.argument("target", metavar="RUN")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--which", default="latest", show_default=True, metavar="latest|best|STEP", help="Which checkpoint.")
def export(target: str, out: Path, which: str) -> None:
    """Copy a run's trained model to OUT, in Hugging Face form. RUN is its folder, settings file or name."""
    if which not in {"latest", "best"} and not which.isdigit():
        raise click.UsageError(f"--which {which}: write latest, best, or the number of a step")
    from workers.role import log_setup as logs
    from workers.runs.find import find_run_folder
    from workers.train.checkpointing.export import export

    logs.configure_logging("export")
    export(find_run_folder(target), out, int(which) if which.isdigit() else which)  # type: ignore[arg-type]
    click.echo(str(out))


@click.command(short_help="Show runs in the browser, live.")
@click.argument("targets", metavar="[RUN]...", nargs=-1)
@options.redis
@click.option("--host", default="127.0.0.1", show_default=True, help="Other machines can look only with a token.")
@click.option("--port", default=7077, show_default=True, type=click.IntRange(0, 65535), help="0: a free one.")
@click.option("--allow-changes", is_flag=True, help="Let pages with the token retry and drop dead letters.")
def dashboard(targets: tuple[str, ...], redis: str, host: str, port: int, allow_changes: bool) -> None:
    """Show runs in the browser. RUN is a folder, a settings file or a name; without one, all runs under runs/.

    Running, stopped, killed and finished runs are shown; nothing of them is changed. The environment variable
    PENSTOCK_DASHBOARD_TOKEN, or the file that PENSTOCK_DASHBOARD_TOKEN_FILE names, sets a token that viewers need.
    With --allow-changes, or a host that other machines can reach, a random one is made otherwise and printed in the
    address.
    """
    from envs.references import import_extra

    for module in ("aiohttp", "jinja2"):
        import_extra(module, "dashboard")
    from workers.dashboard.access import Access
    from workers.dashboard.app import run_dashboard
    from workers.settings.secrets import DASHBOARD_TOKEN, read_secret

    log_errors_only("dashboard")
    access = Access(host=host, token=read_secret(DASHBOARD_TOKEN), allow_changes=allow_changes)
    run_dashboard(targets, redis, access, port)
