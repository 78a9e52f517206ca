"""Commands that start something: a demo, a run, one of its roles, an engine."""

import sys
from pathlib import Path
from typing import Any

import click

from workers.cli import options
from workers.cli.command_group import current_command, exit_process


@click.command()
@click.option("--seed", default=1, show_default=True, help="Of model, data and run.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="The run's folder; runs/demo unless given, and one of its own for another seed, length or control.",
)
@click.option("--steps", default=None, type=click.IntRange(1), help="Optimizer steps.")
@click.option("--control", type=click.Choice(["zero-lr", "permuted"]), help="A run that must not learn.")
@click.option("--prepare", "only_prepare", is_flag=True, help="Make the model, its warm start and run.toml, and stop.")
@click.option("--engine", type=click.Choice(["local", "vllm"]), default="local", show_default=True)
@click.option(
    "--vllm-python",
    default="",
    metavar="PATH",
    help="An interpreter that has vLLM, or its virtual environment; else $PENSTOCK_VLLM, .cache/vllm, our own.",
)
@options.json
def demo(
    seed: int,
    folder: Path | None,
    steps: int | None,
    control: Any,
    only_prepare: bool,
    engine: str,
    vllm_python: str,
    as_json: bool,
) -> None:
    """Train a small model on this machine, in a few minutes."""
    from workers.demo.demo import prepare_demo, run_demo
    from workers.vllm.interpreter import find_interpreter

    if vllm_python and engine != "vllm":
        raise click.UsageError("--vllm-python is for --engine vllm")
    vllm = str(find_interpreter(vllm_python)) if engine == "vllm" else ""
    folder = folder or _demo_folder(seed, steps, control, "vllm" if vllm else None)
    if only_prepare:
        sys.exit(prepare_demo(seed, folder, steps, vllm))
    sys.exit(run_demo(seed, folder, as_json=as_json, control=control, steps=steps, vllm_python=vllm))


def _demo_folder(seed: int, steps: int | None, control: str | None, engine: str | None) -> Path:
    """A demo that is another run than the plain one lives elsewhere, so that both can be resumed."""
    parts = [engine or "", f"seed{seed}" if seed != 1 else "", f"{steps}steps" if steps else "", control or ""]
    return Path("runs") / "-".join(["demo", *filter(None, parts)])


@click.command()
@click.argument("file", type=options.FILE)
@options.overrides
@options.json
@click.option("--quiet", is_flag=True, help="Show no progress.")
def run(file: Path, overrides: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Run what FILE describes on this machine, or resume it.

    Ctrl-C drains and stops; `penstock run runs/NAME/run.toml` goes on from there.
    """
    from workers.run.run_command import run

    sys.exit(run(file, overrides, as_json=as_json, quiet=quiet))


@click.command()
@click.argument("target", metavar="FILE|MODEL_FOLDER", type=options.PATH)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0: a free one, told on the first line.")
@click.option(
    "--runner",
    type=click.Choice(["auto", "generate", "pooling"]),
    default="auto",
    show_default=True,
    help="pooling: scores of a sequence classifier, by POST /classify; auto: what config.json says.",
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="model.dtype, or float32, unless given.")
@options.overrides
def serve(target: Path, host: str, port: int, runner: Any, dtype: str | None, overrides: tuple[str, ...]) -> None:
    """Serve a model: a policy, or a reward model.

    With the local engine, or, where FILE or --set says engine.server = "vllm", a policy with vLLM.
    """
    from workers.run.role_process import run_engine

    exit_process(run_engine(target, host, port, overrides, runner, dtype or ""))


def _role_command(role: str, what: str) -> click.Command:
    @click.command(role, help=what)
    @click.argument("file", type=options.FILE)
    @click.option("--redis", default="", metavar="URL", help="The run's server; run.redis unless given.")
    @click.option("engines", "--engine", multiple=True, metavar="URL", help="An engine; engine.urls unless given.")
    @options.overrides
    def command(file: Path, redis: str, engines: tuple[str, ...], overrides: tuple[str, ...]) -> None:
        from workers.run.role_process import run_role, run_trainer

        if role == "train":
            exit_process(run_trainer(file, overrides, redis, engines, current_command()))
        exit_process(run_role(role, file, overrides, redis, engines))

    return command


feed = _role_command("feed", "One role of a run: put prompts into the pipe.")
rollout = _role_command("rollout", "One role of a run: play episodes. As many processes as you like.")
score = _role_command("score", "One role of a run: measure rewards. As many processes as you like.")
train = _role_command("train", "One role of a run: train, publish, keep checkpoints.")
