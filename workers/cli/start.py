"""Commands that start a demo, a run, one of its roles, or an engine."""

import sys
from pathlib import Path
from typing import Any

import click

from workers.cli import options
from workers.cli.command_group import current_command, exit_process


@click.command()
@click.option("--seed", default=1, show_default=True, help="Seed of problems, sampling and run.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="The run's folder; default: runs/demo, with a suffix for another seed, length or control.",
)
@click.option("--steps", default=None, type=click.IntRange(1), help="Optimizer steps.")
@click.option("--control", type=click.Choice(["zero-lr", "permuted"]), help="A control run that must not learn.")
@click.option("--prepare", "only_prepare", is_flag=True, help="Write the model, the prompts and run.toml, and stop.")
@click.option("--engine", type=click.Choice(["local", "vllm"]), default="local", show_default=True)
@click.option(
    "--vllm-python",
    default="",
    metavar="PATH",
    help="Interpreter with vLLM, or its virtual environment; default: $PENSTOCK_VLLM, .cache/vllm, this interpreter.",
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
    from workers.vllm.launch_command import find_interpreter

    if vllm_python and engine != "vllm":
        raise click.UsageError("--vllm-python is for --engine vllm")
    vllm = str(find_interpreter(vllm_python)) if engine == "vllm" else ""
    folder = folder or _demo_folder(seed, steps, control, "vllm" if vllm else None)
    if only_prepare:
        sys.exit(prepare_demo(seed, folder, steps, vllm))
    sys.exit(run_demo(seed, folder, as_json=as_json, control=control, steps=steps, vllm_python=vllm))


def _demo_folder(seed: int, steps: int | None, control: str | None, engine: str | None) -> Path:
    """Return a separate folder for each variant of the demo, so that each can be resumed."""
    parts = [engine or "", f"seed{seed}" if seed != 1 else "", f"{steps}steps" if steps else "", control or ""]
    return Path("runs") / "-".join(["demo", *filter(None, parts)])


@click.command("base-model")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--name",
    type=click.Choice(["tool-caller", "calculator"]),
    help="tool-caller, the default: calls any tools by their schemas, at random; calculator: the demo's model.",
)
@click.option(
    "source",
    "--from",
    type=click.Path(path_type=Path),
    metavar="FILE.gguf",
    help="Write the model of a GGUF file, or of a folder with one, without quantization.",
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of the weights with --from; default: bfloat16."
)
def base_model(folder: Path, name: str | None, source: Path | None, dtype: Any) -> None:
    """Write a small base model to FOLDER, to try an environment on a laptop; or the model of a GGUF file.

    `[model] path = "FOLDER"` starts a run from it. It is in Hugging Face format. The shipped ones are below a million
    parameters and know no language: docs/base-models.md.
    """
    from workers.demo.base_models import write_base_model

    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"{folder} is not empty; name a new folder")
    if source is None and dtype:
        raise click.UsageError("--dtype is for --from")
    if source is None:
        write_base_model(name or "tool-caller", folder)
    elif name:
        raise click.UsageError("--name is a shipped model, and --from another one: give one of the two")
    else:
        from workers.demo.gguf_models import write_gguf_model

        for line in write_gguf_model(source, folder, dtype or "bfloat16").lines():
            click.echo(line, err=True)
    click.echo(str(folder))


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def init(folder: Path) -> None:
    """Write a project to FOLDER that runs at once: an environment, its test, a reward, settings, a small model."""
    from workers.demo.new_project import write_project

    for path in write_project(folder):
        click.echo(str(path))
    click.echo(f"\nNext: cd {folder} && penstock run run.toml")


@click.command()
@click.argument("target", metavar="FILE|RUN")
@options.overrides
@options.json
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--no-check", is_flag=True, help="Start without the preflight (`penstock check FILE`).")
def run(
    target: str,
    overrides: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    no_check: bool,
) -> None:
    """Start a run on this machine, or resume it. FILE is a settings file, RUN the folder or name of a run.

    First everything is tested that can be tested before an engine starts, as by `penstock check FILE`.

    Ctrl-C drains and stops; `penstock run RUN` resumes. A FILE without run.name starts a new run each time.
    """
    from workers.launch.start import run

    sys.exit(run(target, overrides, as_json=as_json, quiet=quiet, check=not no_check))


@click.command()
@click.argument("target", metavar="FILE|MODEL", type=options.MODEL_OR_PATH)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="0: a free one, printed on the first line.",
)
@click.option(
    "--runner",
    type=click.Choice(["auto", "generate", "pooling"]),
    default="auto",
    show_default=True,
    help="pooling: a sequence classifier, at POST /classify; auto: as config.json says.",
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Default: model.dtype, or float32.")
@options.overrides
def serve(target: Path, host: str, port: int, runner: Any, dtype: str | None, overrides: tuple[str, ...]) -> None:
    """Serve a model: a policy, or a reward model. MODEL is a folder, or OWNER/NAME or OWNER/NAME@REVISION on the hub.

    Uses the local engine, or vLLM if FILE or --set has engine.server = "vllm".
    """
    from workers.launch.serve import run_engine

    exit_process(run_engine(target, host, port, overrides, runner, dtype or ""))


def _role_command(role: str, text: str) -> click.Command:
    @click.command(role, help=text)
    @click.argument("file", metavar="FILE|URL", type=options.FILE_OR_URL)
    @click.option(
        "--redis", default="", metavar="URL", help="URL of the run's server; default: run.redis, $PENSTOCK_REDIS."
    )
    @click.option(
        "engines",
        "--engine",
        multiple=True,
        metavar="URL",
        help="URL of an engine; may be repeated; default: engine.urls.",
    )
    @options.overrides
    def command(
        file: Path | str,
        redis: str,
        engines: tuple[str, ...],
        overrides: tuple[str, ...],
    ) -> None:
        from workers.launch.role_process import run_role, run_trainer

        if role == "train":
            exit_process(run_trainer(file, overrides, redis, engines, current_command()))
        exit_process(run_role(role, file, overrides, redis, engines))

    return command


feed = _role_command("feed", "One role of a run: feed prompts.")
rollout = _role_command("rollout", "One role of a run: sample episodes. Start any number of processes.")
score = _role_command("score", "One role of a run: measure rewards. Start any number of processes.")
train = _role_command("train", "One role of a run: train and publish weights, save checkpoints.")
