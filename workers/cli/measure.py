"""Commands that try environments and rewards, measure policies and reward models, and list algorithms."""

import sys
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import click

from workers.cli import options
from workers.cli.command_group import exit_process, log_errors_only


class OrderedTurns(click.Command):
    """A command that knows in which order `--call` and `--say` were given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the order, and parse the arguments."""
        ctx.meta["turns"] = [name for name in (arg.partition("=")[0] for arg in args) if name in ("--call", "--say")]
        return super().parse_args(ctx, args)


@click.command(cls=OrderedTurns, short_help="Try an environment, a reward function, or a settings file.")
@click.argument("ref", metavar="REF|FILE")
@click.argument("tasks", metavar="[TASKS]", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("fields", "--field", multiple=True, metavar="k=v", help="A column of the row; may be repeated.")
@click.option(
    "arguments", "--args", multiple=True, metavar="k=v", help="An argument as in the settings; may be repeated."
)
@click.option(
    "--call",
    multiple=True,
    metavar="TOOL={..}",
    help="A tool call with its arguments as JSON, instead of samples; may be repeated.",
)
@click.option("--say", multiple=True, metavar="TEXT", help="A turn without a call; played in order with --call.")
@click.option("--env", "environment", default="", metavar="REF", help="For a reward function that reads environments.")
@click.option("--sample", default=0, type=click.IntRange(0), metavar="N", help="With TASKS: only N of them; 0: all.")
@click.option("--again", is_flag=True, help="With TASKS: also those that have not changed since they were tried.")
@options.overrides
@click.option("--report", "path", type=click.Path(path_type=Path), metavar="PATH", help="Also write it as JSON.")
@options.json
def check(
    ref: str,
    tasks: Path | None,
    fields: tuple[str, ...],
    arguments: tuple[str, ...],
    overrides: tuple[str, ...],
    path: Path | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Try the environment or the reward function REF without a model, or everything that the settings FILE names.

    Shows an environment's tools as a model sees them, the reward of an episode, the content of its snapshot, and every
    violation of the contract. A reward function is called with sample rows.

    A settings FILE (.toml) is tested as `penstock run` tests it before it starts an engine: model, chat template, data,
    environments, reward functions, lengths, disk, memory, Redis. All faults are reported at once.

    `penstock check harbor TASKS` runs the solution of each task in a folder, and an episode without a call, three
    times, in sandboxes: `--set sandboxes.provider=docker`.
    """
    import msgspec

    from stream.durable import write_file_atomically
    from workers.check.check import check as run_check
    from workers.check.report_text import print_report
    from workers.role.exit_codes import ExitCode
    from workers.role.log_setup import configure_logging
    from workers.runs.export import encode_json

    configure_logging("check", level="warning")
    if tasks is not None:
        _check_tasks(ref, tasks, overrides, path, as_json=as_json, sample=chosen["sample"], again=chosen["again"])
    given = {"--call": map(options.parse_call, chosen["call"]), "--say": iter(chosen["say"])}
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # user code may print
        report = run_check(
            ref,
            fields=options.parse_pairs(fields, "--field"),
            args=options.parse_pairs(arguments, "--args"),
            turns=[next(given[name]) for name in click.get_current_context().meta["turns"]],
            environment=chosen["environment"],
            overrides=overrides,
            exits_on_hang=True,
        )
    encoded = msgspec.json.format(encode_json(msgspec.to_builtins(report, enc_hook=str)), indent=2)
    if path is not None:
        write_file_atomically(path, encoded)
    if as_json:
        click.echo(encoded)
    else:
        print_report(report)
    exit_process(ExitCode.SUCCESS if report.ok else ExitCode.FAILURE)


def _check_tasks(
    ref: str, tasks: Path, overrides: tuple[str, ...], path: Path | None, *, as_json: bool, sample: int, again: bool
) -> None:
    """Try the tasks in a folder, print the report, and exit."""
    import anyio
    import msgspec

    from stream.durable import write_file_atomically
    from workers.check.harbor import check_tasks, report_lines
    from workers.role.exit_codes import ExitCode
    from workers.settings.toml_file import settings_for_model

    if ref != "harbor":
        raise click.UsageError("TASKS is a folder of tasks for REF harbor")
    settings = settings_for_model(Path("no-model"), overrides).sandboxes
    progress = partial(click.echo, err=True)
    report = anyio.run(partial(check_tasks, tasks, settings, sample=sample, again=again, progress=progress))
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if path is not None:
        write_file_atomically(path, encoded)
    click.echo(encoded if as_json else "\n".join(report_lines(report)))
    sys.exit(ExitCode.SUCCESS if report.ok else ExitCode.FAILURE)


@click.command()
@click.argument("ref")
@click.option(
    "--policy", type=options.MODEL_OR_PATH, help="A model folder or hub name, a checkpoint, or a run's folder."
)
@click.option(
    "--endpoint",
    default="",
    metavar="URL",
    help="An OpenAI-compatible server; with --policy, an engine that serves that model.",
)
@click.option("--model", default="", metavar="NAME", help="The endpoint's model; default: the first that it lists.")
@click.option("count", "-n", default=8, show_default=True, type=click.IntRange(1, 1024), help="Episodes.")
@click.option("fields", "--field", multiple=True, metavar="k=v", help="A column of the row; may be repeated.")
@click.option("arguments", "--args", multiple=True, metavar="k=v", help="An argument of the factory; may be repeated.")
@click.option("--prompt", default="", metavar="TEXT", help="The user's message; default: what reset returns.")
@click.option("rewards", "--reward", multiple=True, metavar="REF", help="A reward function; may be repeated.")
@click.option("--seed", default=0, show_default=True, help="Seed of the problem, and of sampling.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Save the completions as JSON lines.")
@options.overrides
@options.json
def play(fields: tuple[str, ...], arguments: tuple[str, ...], as_json: bool, **chosen: Any) -> None:
    """Play the environment REF against a model: no run, no Redis, no settings file.

    Prints each conversation with its rewards, and their mean and spread. All episodes have the same problem, as the
    completions of a group have. An endpoint's key is read from OPENAI_API_KEY.
    """
    from msgspec import convert

    from workers.evaluate.play import PlayOptions, play_and_print

    log_errors_only("play")
    pairs = {"args": options.parse_pairs(arguments, "--args"), "fields": options.parse_pairs(fields, "--field")}
    exit_process(play_and_print(convert(chosen | pairs, PlayOptions), as_json=as_json))


@click.command(short_help="List estimators, losses and presets with their formulas.")
@options.json
def algorithms(as_json: bool) -> None:
    """List estimators, losses, presets and related functions, each with its formula and source."""
    from workers.cli.algorithms import show_algorithms

    show_algorithms(as_json=as_json)


@click.command("eval", short_help="Measure a policy on held-out prompts.")
@click.argument("file", type=options.FILE)
@click.option(
    "--policy",
    type=options.MODEL_OR_PATH,
    help="A model folder or hub name, a checkpoint, or a run's folder (its latest checkpoint).",
)
@click.option(
    "--engine", default="", metavar="URL", help="Sample from this engine; --policy, if given, is pushed to it."
)
@options.overrides
@options.json
def evaluate(file: Path, policy: Path | None, engine: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Measure a policy on the held-out prompts of FILE ([eval]), without a run.

    Without --engine, an engine is started for it. Scores are over valid completions / over all completions.
    """
    from workers.evaluate.evaluate import evaluate_and_print

    log_errors_only("eval")
    exit_process(evaluate_and_print(file, overrides, policy, engine, as_json=as_json))


@click.command(short_help="Measure a reward model on pairs of answers.")
@click.argument("file", type=options.FILE)
@click.option("urls", "--url", multiple=True, required=True, metavar="URL", help="A reward server; may be repeated.")
@click.option(
    "--reference", type=options.MODEL_OR_PATH, metavar="MODEL", help="Also score with transformers, and compare."
)
@options.json
def rewardbench(file: Path, urls: tuple[str, ...], reference: Path | None, as_json: bool) -> None:
    """Score the pairs of FILE with a served reward model: accuracy by subset, as in RewardBench.

    FILE is JSONL or Parquet with the columns prompt, chosen, rejected and subset. A pair that could not be scored
    counts as neither correct nor wrong; the exit code is then 1.
    """
    from workers.evaluate.rewardbench import run_rewardbench

    log_errors_only("rewardbench")
    sys.exit(run_rewardbench(file, urls, reference, as_json=as_json))


@click.command(short_help="Score archived groups with other reward functions.")
@click.argument("target", metavar="RUN")
@click.option("--rewards", "file", type=options.FILE, metavar="FILE", help="A TOML file with [[rewards]].")
@click.option("refs", "--reward", multiple=True, metavar="REF", help="A reward function; may be repeated.")
@click.option(
    "--name",
    default="",
    help="Name of the comparison, stored in RUN/rescored/NAME; default: the file's name, or 'rescored'.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Store the comparison in this folder instead.")
@options.json
def rescore(target: str, file: Path | None, refs: tuple[str, ...], name: str, out: Path | None, as_json: bool) -> None:
    """Score a run's archived groups with other reward functions and compare. Nothing is sampled.

    RUN is its folder, settings file or name; its files are not changed. Reward functions see the environments' frozen
    snapshots; rewards that environments measured themselves are kept.
    """
    from workers.evaluate.rescore import rescore_and_print

    if (file is None) == (not refs):
        raise click.UsageError("give either --rewards FILE or --reward REF")
    log_errors_only("rescore")
    rescore_and_print(target, file, refs, name=name, out=out, as_json=as_json)
