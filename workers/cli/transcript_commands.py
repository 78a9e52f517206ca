"""`penstock show`, `export-groups` and `trace`: what the model said in a run, its rewards, and where the time went."""

from pathlib import Path
from typing import Any, Literal

import click

from workers.cli import options
from workers.cli.command_group import log_errors_only


def _filters(command: Any) -> Any:
    """Add the options that select completions."""
    for option in reversed(
        (
            click.option("--step", default="", metavar="N|N..M", help="Of these optimizer steps."),
            click.option("--version", default="", metavar="N|N..M", help="Sampled by these policy versions."),
            click.option("--reward", default="", metavar="R|R..S", help="With a measured reward in this interval."),
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
