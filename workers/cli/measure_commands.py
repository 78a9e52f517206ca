"""Commands that try and measure: environments, reward functions, policies; and what there is to train with."""

import sys
from pathlib import Path

import click

from workers.cli import options
from workers.cli.command_group import exit_process, log_errors_only


@click.command()
@click.argument("ref")
@click.option("fields", "--field", multiple=True, metavar="k=v", help="A column of the row; may be repeated.")
@click.option(
    "arguments", "--args", multiple=True, metavar="k=v", help="An argument as in the settings; may be repeated."
)
@click.option("--env", "world", default="", metavar="REF", help="For a reward function that looks at environments.")
@options.json
def check(ref: str, fields: tuple[str, ...], arguments: tuple[str, ...], world: str, as_json: bool) -> None:
    """Try the environment, or the reward function, REF without a model.

    What an environment's tools look like to a model, what an episode is worth, what its snapshot holds, and where it
    does not live up to its contract. A reward function is called with made-up rows.
    """
    from workers.commands.check import check_reference

    sys.exit(check_reference(ref, fields, as_json, arguments, world))


@click.command()
@options.json
def algorithms(as_json: bool) -> None:
    """List estimators, losses and what goes with them, each with its formula and source."""
    from workers.commands.algorithms import show_algorithms

    show_algorithms(as_json=as_json)


@click.command("eval")
@click.argument("file", type=options.FILE)
@click.option(
    "--policy", type=options.PATH, help="A model's folder, a checkpoint, or a run's folder (its latest checkpoint)."
)
@click.option(
    "--engine", default="", metavar="URL", help="Sample from this engine, with the policy pushed to it if any."
)
@options.overrides
@options.json
def evaluate(file: Path, policy: Path | None, engine: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Measure a policy on the held-out prompts of FILE ([eval]), without a run.

    Without --engine one of the settings' kind is started for it. Figures are over valid completions / over all of them.
    """
    from workers.commands.evaluate.evaluate import evaluate_and_print

    log_errors_only("eval")
    exit_process(evaluate_and_print(file, overrides, policy, engine, as_json=as_json))


@click.command()
@click.argument("file", type=options.FILE)
@click.option("urls", "--url", multiple=True, required=True, metavar="URL", help="A reward server; may be repeated.")
@click.option(
    "--reference", type=options.PATH, metavar="MODEL_FOLDER", help="Score with transformers too, and compare."
)
@options.json
def rewardbench(file: Path, urls: tuple[str, ...], reference: Path | None, as_json: bool) -> None:
    """Score the pairs of FILE with a served reward model: accuracy by subset, as RewardBench has them.

    FILE is JSONL or Parquet with the columns prompt, chosen, rejected and subset. A pair that could not be scored is
    neither won nor lost; the exit code is then 1.
    """
    from workers.commands.rewardbench.rewardbench import run_rewardbench

    log_errors_only("rewardbench")
    sys.exit(run_rewardbench(file, urls, reference, as_json=as_json))


@click.command()
@click.argument("target", metavar="RUN")
@click.option("--rewards", "file", type=options.FILE, metavar="FILE", help="A TOML file with [[rewards]].")
@click.option("refs", "--reward", multiple=True, metavar="REF", help="A reward function; may be repeated.")
@click.option(
    "--name", default="", help="Of the comparison: RUN/rescored/NAME; the file's, or 'rescored', unless given."
)
@click.option("--out", type=click.Path(path_type=Path), help="Another folder for it.")
@options.json
def rescore(target: str, file: Path | None, refs: tuple[str, ...], name: str, out: Path | None, as_json: bool) -> None:
    """Score a run's archived groups with other reward functions, and compare. Nothing is sampled.

    RUN is its folder, settings file or name; its own files are not changed. Reward functions see the environments'
    frozen snapshots; what environments measured themselves stays as it was.
    """
    from workers.commands.rescore.rescore import rescore_and_print

    if (file is None) == (not refs):
        raise click.UsageError("say what to score with: --rewards FILE, or --reward REF")
    log_errors_only("rescore")
    rescore_and_print(target, file, refs, name=name, out=out, as_json=as_json)
