"""Commands that look at a run: its queues, groups, completions, logs, times and accounts; what they export."""

import sys
from pathlib import Path
from typing import Any, Literal

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
    """Copy a run's trained model to OUT, in Hugging Face form. RUN is its folder, settings file or name.

    OUT/README.md is a model card: data, estimator, scores, what was masked and why, and how to make the model again.
    """
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


def _filters(command: Any) -> Any:
    """Add the options that select completions."""
    for option in reversed(
        (
            click.option("--step", default="", metavar="N|N..M", help="Of these optimizer steps."),
            click.option("--version", default="", metavar="N|N..M", help="Sampled by these policy versions."),
            click.option("--reward", default="", metavar="R|R..S", help="With a measured reward in this range."),
            click.option(
                "--end",
                multiple=True,
                metavar="WORD",
                help="How the episode ended (finished, truncated, max_turns, failed, valid, invalid, ..) or the group "
                "(trained, dropped, dropped:REASON, unfinished); may be repeated.",
            ),
            click.option("--prompt", default="", metavar="ID|TEXT", help="Of this prompt, or with this text in it."),
            click.option("--invalid", is_flag=True, help="Only completions that failed or have no measured reward."),
        )
    ):
        command = option(command)
    return command


@click.command(short_help="Show completions as conversations, with rewards.")
@options.run
@options.redis
@_filters
@click.option("order", "--best", flag_value="best", help="The highest rewards first.")
@click.option("order", "--worst", flag_value="worst", help="The lowest rewards first.")
@click.option("order", "--random", flag_value="random", help="A random choice; --seed chooses another one.")
@click.option("count", "-n", default=3, show_default=True, type=click.IntRange(1), help="How many completions.")
@click.option("--seed", default=0, show_default=True, help="Of the random choice.")
@click.option("--full", is_flag=True, help="Do not shorten long messages.")
@click.option("evaluated", "--eval", is_flag=True, help="Of held-out prompts; --step: whose weights were evaluated.")
@click.option("pair", "--diff", nargs=2, type=int, metavar="A B", help="Two completions of one group, side by side.")
@options.json
def show(
    target: str | None,
    redis: str,
    order: Any,
    count: int,
    seed: int,
    full: bool,
    as_json: bool,
    pair: tuple[int, int] | None,
    **conditions: Any,
) -> None:
    """Show completions of a run as conversations, with tool calls, rewards, and why they are invalid.

    RUN is its folder, settings file or name; it may be running, stopped, killed or finished. Default: the run that is
    running, or else the newest. The newest completions come first. With --diff A B: completions A and B, counted from
    0, of the newest group that matches, for example with --prompt ID. Read-only.
    """
    from workers.runs.find import open_run
    from workers.runs.selection import Selection
    from workers.terminal.show import show_completions, show_difference

    log_errors_only("show")
    evaluated = conditions.pop("evaluated")
    if evaluated and pair is not None:
        raise click.UsageError("--diff compares completions of the training: leave out --eval")
    wanted, run = _parse_filter(conditions), open_run(target, redis)
    if pair is not None:
        show_difference(run, wanted, pair, full=full, as_json=as_json)
        return
    selection = Selection(order or "newest", count, seed)
    show_completions(run, wanted, selection, evaluated=evaluated, full=full, as_json=as_json)


@click.command(short_help="List groups with outcome and rewards.")
@options.run
@options.redis
@_filters
@click.option("count", "-n", default=20, show_default=True, type=click.IntRange(1), help="How many groups.")
@options.json
def groups(target: str | None, redis: str, count: int, as_json: bool, **conditions: Any) -> None:
    """List a run's groups of which a completion matches, the newest first.

    RUN is its folder, settings file or name; it may be running, stopped, killed or finished. Default: the run that is
    running, or else the newest. --json prints a line for each group. Read-only.
    """
    from workers.runs.find import open_run
    from workers.terminal.groups import list_groups

    log_errors_only("groups")
    list_groups(open_run(target, redis), _parse_filter(conditions), count, as_json=as_json)


@click.command("export-groups", short_help="Write completions with masks and advantages.")
@options.run
@click.argument("out", required=False, default="", metavar="[OUT]")
@click.option("format_", "--jsonl", flag_value="jsonl", help="One JSON object per line.")
@click.option("format_", "--parquet", flag_value="parquet", help='Parquet; needs "penstock[data]".')
@_filters
def export_groups(target: str | None, out: str, format_: Literal["jsonl", "parquet"] | None, **conditions: Any) -> None:
    """Write a run's archived completions with tokens, masks, rewards and advantages to OUT.

    One line or row per completion, in the order of the ledger. Default for OUT: groups.jsonl or groups.parquet in the
    run's folder; - writes JSONL to stdout.
    """
    from workers.runs.find import open_run
    from workers.terminal.output import print_note

    log_errors_only("export-groups")
    report = open_run(target).export(out, format_, _parse_filter(conditions))
    if report.damaged:
        print_note(f"{len(report.damaged)} damaged: {report.damaged[0]}")
    click.echo(str(report), err=out == "-")


@click.command(short_help="Write where groups spent their time, for Perfetto or OpenTelemetry.")
@options.run
@click.option(
    "--perfetto", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write Chrome's JSON."
)
@click.option("--otlp", default="", metavar="URL", help='Send to a collector; needs "penstock[otel]".')
@click.option("--step", default="", metavar="N|N..M", help="Of these optimizer steps.")
@click.option("count", "-n", default=1000, show_default=True, type=click.IntRange(1), help="The newest N groups.")
def trace(target: str | None, perfetto: Path | None, otlp: str, step: str, count: int) -> None:
    """Write where a run's archived groups spent their time: queues, turns, tools, rewards, scoring, step, publication.

    RUN is its folder, settings file or name; it may be running, stopped, killed or finished. Default: the run that is
    running, or else the newest. Needs no server. The log lines of a group have its id as `prompt`.
    """
    from workers.runs.find import open_run
    from workers.runs.trace import write_perfetto
    from workers.terminal.output import print_note

    if perfetto is None and not otlp:
        raise click.UsageError("nothing to write: add --perfetto FILE or --otlp URL")
    log_errors_only("trace")
    run = open_run(target)
    traced = run.trace(step, count)
    for note in traced.notes[:3]:
        print_note(note)
    if perfetto is not None:
        write_perfetto(traced, perfetto)
        click.echo(f"{perfetto}: {len(traced.groups)} groups; open it at https://ui.perfetto.dev")
    if otlp:
        try:
            from workers.runs.opentelemetry_export import export_spans
        except ModuleNotFoundError as error:
            raise click.UsageError(f'--otlp needs {error.name}: pip install "penstock[otel]"') from error
        click.echo(f"sent {export_spans(traced.groups, run.name, otlp)} traces to {otlp}")


def _parse_filter(options: Any) -> Any:
    from workers.runs.selection import CompletionFilter

    return CompletionFilter.parse(**options)
