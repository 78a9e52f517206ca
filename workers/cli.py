"""The command `penstock`.

Every command imports what it needs when it runs, so that `penstock --help` is there at once and `penstock queues` needs
neither torch nor a model. Exit codes: 0 done; 1 failed; 2 the command line or the settings are at fault, and nothing
was started.
"""

import os
import sys
from pathlib import Path
from typing import Any, Literal

import click

from workers.failures import expected
from workers.installation import check_installation, own_packages_first

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_TARGET = click.Path(exists=True, path_type=Path)
_ACL_ROLES = ("feed", "rollout", "score", "train", "run", "operator", "look")
_set = click.option("overrides", "--set", multiple=True, metavar="a.b=c", help="Override a setting; may be repeated.")
_json = click.option("as_json", "--json", is_flag=True, help="Print JSON for programs.")
_redis = click.option("--redis", default="", metavar="URL", help="The run's server, if the run itself does not say.")


class Commands(click.Group):
    """The commands, in the order in which they are written; every error of ours becomes a `Failure`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order of this file."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            known = expected(error)
            if known is None:
                raise
            raise known from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
def penstock() -> None:
    """Async streaming rollout pipeline for reinforcement learning on language models."""
    check_installation()


@penstock.command()
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
@_json
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
    from workers.engine.vllm.interpreter import find

    if vllm_python and engine != "vllm":
        raise click.UsageError("--vllm-python is for --engine vllm")
    vllm = str(find(vllm_python)) if engine == "vllm" else ""
    folder = folder or _demo_folder(seed, steps, control, "vllm" if vllm else None)
    if only_prepare:
        sys.exit(prepare_demo(seed, folder, steps, vllm))
    sys.exit(run_demo(seed, folder, as_json=as_json, control=control, steps=steps, vllm=vllm))


def _demo_folder(seed: int, steps: int | None, control: str | None, engine: str | None) -> Path:
    """A demo that is another run than the plain one lives elsewhere, so that both can be resumed."""
    parts = [engine or "", f"seed{seed}" if seed != 1 else "", f"{steps}steps" if steps else "", control or ""]
    return Path("runs") / "-".join(["demo", *filter(None, parts)])


@penstock.command()
@click.argument("file", type=_FILE)
@_set
@_json
@click.option("--quiet", is_flag=True, help="Show no progress.")
def run(file: Path, overrides: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Run what FILE describes on this machine, or resume it.

    Ctrl-C drains and stops; `penstock run runs/NAME/run.toml` goes on from there.
    """
    from workers.run.command import run

    sys.exit(run(file, overrides, as_json=as_json, quiet=quiet))


@penstock.command()
@click.argument("target", metavar="[RUN]", required=False)
@_redis
@_json
@click.option("--watch", is_flag=True, help="Look again every second, until the run has finished.")
def queues(target: str | None, redis: str, as_json: bool, watch: bool) -> None:
    """Show where a run's prompts are. RUN is its folder, settings file or name.

    Looking changes nothing. Without RUN: the one that goes on under runs/.
    """
    from workers.queues import show_queues

    _log_errors_alone("queues")
    show_queues(target, redis, as_json=as_json, watch=watch)


def _add_word(word: Literal["pause", "resume", "stop"], what: str) -> None:
    @penstock.command(word, help=what)
    @click.argument("target", metavar="[RUN]", required=False)
    @_redis
    def command(target: str | None, redis: str) -> None:
        from workers.steering import steer

        _log_errors_alone(word)
        steer(word, target, redis)


_add_word("pause", "Hand out no new prompts; what is in hand is finished, scored and trained.")
_add_word("resume", "Let a paused run go on.")
_add_word("stop", "Let every role drain, and the trainer keep a checkpoint; `penstock run` goes on from there.")


@penstock.command()
@click.argument("target", metavar="[RUN]", required=False)
@_redis
@_json
@click.option("--all", "every", is_flag=True, help="Tell of all that are lost or counted twice, not of some.")
def audit(target: str | None, redis: str, as_json: bool, every: bool) -> None:
    """Say where each prompt fed has ended; exit code 1 if any is lost or counted twice.

    RUN is its folder, settings file or name; it may go on, rest, or have ended. Looking changes nothing.
    """
    from workers.audit import show_audit

    _log_errors_alone("audit")
    sys.exit(show_audit(target, redis, as_json=as_json, every=every))


@penstock.command()
@click.argument("target", metavar="[RUN]", required=False)
@_json
def replay(target: str | None, as_json: bool) -> None:
    """Train a run's groups again, in the order of its ledger; exit code 1 if that gives other weights.

    RUN is its folder, settings file or name. The groups come from its archive (archive.keep = "all"); the weights are
    compared with its checkpoints bit for bit. Nothing of the run is changed.
    """
    from workers.replay import show_replay

    _log_errors_alone("replay")
    sys.exit(show_replay(target, as_json=as_json, command=_own_command()))


@penstock.command()
@click.argument("target", metavar="RUN")
@click.option(
    "roles", "--role", multiple=True, type=click.Choice(_ACL_ROLES), help="All unless given; may be repeated."
)
def acl(target: str, roles: tuple[str, ...]) -> None:
    """Print an aclfile with a user for each role of RUN, that may do its work there and nothing else.

    RUN is a folder, a settings file or a name; it need not have begun. The users have no passwords, so nobody can be
    them before you add some.
    """
    from workers.acl import print_acl

    print_acl(target, roles)


@penstock.group()
def engines() -> None:
    """Show a run's engines, add one, or remove one, while it goes on."""
    _log_errors_alone("engines")


@engines.command("list")
@click.argument("target", metavar="[RUN]", required=False)
@_redis
@_json
def list_engines(target: str | None, redis: str, as_json: bool) -> None:
    """List the engines that settings and operators name, and whether each answers."""
    from workers.engines import list_engines

    list_engines(target, redis, as_json=as_json)


def _add_word_on_engine(word: Literal["add", "remove"], what: str) -> None:
    @engines.command(word, help=what)
    @click.argument("url")
    @click.argument("target", metavar="[RUN]", required=False)
    @_redis
    @_json
    def command(url: str, target: str | None, redis: str, as_json: bool) -> None:
        from workers.engines import say_of_engine

        say_of_engine(word, url, target, redis, as_json=as_json)


_add_word_on_engine("add", "Let the run use the engine at URL, once it has the current weights.")
_add_word_on_engine("remove", "Give the engine at URL nothing more to do, whoever names it; `add` undoes that.")


@penstock.group()
def dead() -> None:
    """Show, retry or drop what no worker could finish."""
    _log_errors_alone("dead")


def _letters(command: Any) -> Any:
    """What the commands on dead letters have in common."""
    ids = click.option("ids", "--id", multiple=True, metavar="ID", help="A letter's id; may be repeated.")
    return click.argument("target", metavar="[RUN]", required=False)(ids(_redis(_json(command))))


_all = click.option("every", "--all", is_flag=True, help="All of them.")


@dead.command("list")
@_letters
def list_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool) -> None:
    """List dead letters, oldest first."""
    from workers.dead import list_dead

    list_dead(target, redis, ids, as_json=as_json)


@dead.command("show")
@_letters
def show_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool) -> None:
    """Show dead letters with what is in them."""
    from workers.dead import show_dead

    show_dead(target, redis, ids, as_json=as_json)


@dead.command("retry")
@_letters
@_all
def retry_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool, every: bool) -> None:
    """Put dead letters back where they came from, with fresh budgets."""
    from workers.dead import retry_dead

    retry_dead(target, redis, _chosen(ids, every), as_json=as_json)


@dead.command("drop")
@_letters
@_all
def drop_letters(target: str | None, ids: tuple[str, ...], redis: str, as_json: bool, every: bool) -> None:
    """Delete dead letters for good; their prompts count as dropped."""
    from workers.dead import drop_dead

    drop_dead(target, redis, _chosen(ids, every), as_json=as_json)


def _chosen(ids: tuple[str, ...], every: bool) -> tuple[str, ...]:
    """The ids that were named; none means all, which has to be said."""
    if bool(ids) == every:
        raise click.UsageError("name letters by --id, or take them all with --all")
    return ids


@penstock.command()
@click.argument("ref")
@click.option("fields", "--field", multiple=True, metavar="k=v", help="A column of the row; may be repeated.")
@click.option(
    "arguments", "--args", multiple=True, metavar="k=v", help="An argument as in the settings; may be repeated."
)
@click.option("--env", "world", default="", metavar="REF", help="For a reward function that looks at environments.")
@_json
def check(ref: str, fields: tuple[str, ...], arguments: tuple[str, ...], world: str, as_json: bool) -> None:
    """Try the environment, or the reward function, REF without a model.

    What an environment's tools look like to a model, what an episode is worth, what its snapshot holds, and where it
    does not live up to its contract. A reward function is called with made-up rows.
    """
    from workers.check import check_main

    sys.exit(check_main(ref, fields, as_json, arguments, world))


@penstock.command()
@_json
def estimators(as_json: bool) -> None:
    """List estimators, losses and what goes with them, each with its formula and source."""
    from workers.catalogue import show_catalogue

    show_catalogue(as_json=as_json)


@penstock.command()
@click.argument("run_folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--which", default="latest", show_default=True, metavar="latest|best|STEP", help="Which checkpoint.")
def export(run_folder: Path, out: Path, which: str) -> None:
    """Copy a run's trained model to OUT, in Hugging Face form."""
    if which not in {"latest", "best"} and not which.isdigit():
        raise click.UsageError(f"--which {which}: write latest, best, or the number of a step")
    from workers import logs
    from workers.train.keeping.export import export

    logs.configure("export")
    export(run_folder, out, int(which) if which.isdigit() else which)  # type: ignore[arg-type]
    click.echo(str(out))


@penstock.command("eval")
@click.argument("file", type=_FILE)
@click.option(
    "--policy", type=_TARGET, help="A model's folder, a checkpoint, or a run's folder (its latest checkpoint)."
)
@click.option(
    "--engine", default="", metavar="URL", help="Sample from this engine, with the policy pushed to it if any."
)
@_set
@_json
def evaluate(file: Path, policy: Path | None, engine: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Measure a policy on the held-out prompts of FILE ([eval]), without a run.

    Without --engine one of the settings' kind is started for it. Figures are over valid completions / over all of them.
    """
    from workers.evaluation.command import show_evaluation

    _log_errors_alone("eval")
    _leave(show_evaluation(file, overrides, policy, engine, as_json=as_json))


@penstock.command()
@click.argument("target", metavar="FILE|MODEL_FOLDER", type=_TARGET)
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
@_set
def serve(target: Path, host: str, port: int, runner: Any, dtype: str | None, overrides: tuple[str, ...]) -> None:
    """Serve a model: a policy, or a reward model.

    With the local engine, or, where FILE or --set says engine.server = "vllm", a policy with vLLM.
    """
    from workers.process import launch_engine

    _leave(launch_engine(target, host, port, overrides, runner, dtype or ""))


@penstock.command()
@click.argument("file", type=_FILE)
@click.option("urls", "--url", multiple=True, required=True, metavar="URL", help="A reward server; may be repeated.")
@click.option("--reference", type=_TARGET, metavar="MODEL_FOLDER", help="Score with transformers too, and compare.")
@_json
def rewardbench(file: Path, urls: tuple[str, ...], reference: Path | None, as_json: bool) -> None:
    """Score the pairs of FILE with a served reward model: accuracy by subset, as RewardBench has them.

    FILE is JSONL or Parquet with the columns prompt, chosen, rejected and subset. A pair that could not be scored is
    neither won nor lost; the exit code is then 1.
    """
    from workers.rewardbench.command import bench

    _log_errors_alone("rewardbench")
    sys.exit(bench(file, urls, reference, as_json=as_json))


@penstock.command()
@click.argument("target", metavar="RUN")
@click.option("--rewards", "file", type=_FILE, metavar="FILE", help="A TOML file with [[rewards]].")
@click.option("refs", "--reward", multiple=True, metavar="REF", help="A reward function; may be repeated.")
@click.option(
    "--name", default="", help="Of the comparison: RUN/rescored/NAME; the file's, or 'rescored', unless given."
)
@click.option("--out", type=click.Path(path_type=Path), help="Another folder for it.")
@_json
def rescore(target: str, file: Path | None, refs: tuple[str, ...], name: str, out: Path | None, as_json: bool) -> None:
    """Score a run's archived groups with other reward functions, and compare. Nothing is sampled.

    RUN is its folder, settings file or name; its own files are not changed. Reward functions see the environments'
    frozen snapshots; what environments measured themselves stays as it was.
    """
    from workers.rescore.command import show_rescored

    if (file is None) == (not refs):
        raise click.UsageError("say what to score with: --rewards FILE, or --reward REF")
    _log_errors_alone("rescore")
    show_rescored(target, file, refs, name=name, out=out, as_json=as_json)


def _log_errors_alone(command: str) -> None:
    """For commands whose output is a table: waking a server is nothing to tell."""
    from workers import logs

    logs.configure(command, level="error")


def _leave(code: int) -> None:
    """End a role's process at once: an environment's thread that hangs would keep it for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _add_role(role: str, what: str) -> None:
    @penstock.command(role, help=what)
    @click.argument("file", type=_FILE)
    @click.option("--redis", default="", metavar="URL", help="The run's server; run.redis unless given.")
    @click.option("engines", "--engine", multiple=True, metavar="URL", help="An engine; engine.urls unless given.")
    @_set
    def command(file: Path, redis: str, engines: tuple[str, ...], overrides: tuple[str, ...]) -> None:
        from workers.process import launch, launch_trainer

        if role == "train":
            _leave(launch_trainer(file, overrides, redis, engines, _own_command()))
        _leave(launch(role, file, overrides, redis, engines))


def _own_command() -> tuple[str, ...]:
    """What started this process, for others of its kind; as the supervisor starts a role, whatever lies in `.`."""
    return (sys.executable, "-P", "-m", "workers", *sys.argv[1:])


_add_role("feed", "One role of a run: put prompts into the pipe.")
_add_role("rollout", "One role of a run: play episodes. As many processes as you like.")
_add_role("score", "One role of a run: measure rewards. As many processes as you like.")
_add_role("train", "One role of a run: train, publish, keep checkpoints.")


def main() -> None:
    """The console script."""
    own_packages_first()
    penstock(prog_name="penstock")
