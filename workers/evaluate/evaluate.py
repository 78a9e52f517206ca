"""Measure a policy on the held-out prompts of a settings file, and print the scores."""

import time
from contextlib import nullcontext
from pathlib import Path

import anyio
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stream.errors import SettingsError
from stream.records import Prompt
from stream.wording import format_counts
from workers.datasets.environment_rows import temporary_folder, write_evaluation_rows
from workers.datasets.prompts import read_evaluation_prompts
from workers.evaluate.standalone_rollout import roll_out_and_score
from workers.evaluate.temporary_engine import with_existing_engine, with_started_engine
from workers.hub.names import EVAL_SECTION, MODEL_SECTION, find_model, known_values, print_note, resolve_names
from workers.launch.process import run_async
from workers.role.exit_codes import ExitCode
from workers.runs.evaluations import EvaluationResult
from workers.score.worker import evaluate_group
from workers.settings import LoraSettings, Settings
from workers.settings.toml_file import load_settings
from workers.terminal.output import print_json
from workers.train.checkpointing.checkpoint import MANIFEST, MODEL, CheckpointStore
from workers.train.evaluations import summarize
from workers.train.model.adapter import is_adapter


def evaluate_and_print(
    file: Path, overrides: tuple[str, ...], policy: Path | None, engine: str, *, as_json: bool = False
) -> int:
    """Evaluate a policy and print the scores. Returns the exit code.

    Raises:
        PenstockError: the settings have no held-out prompts, there is no such policy, or no engine answers.
    """
    settings = load_settings(file, overrides)
    if not settings.eval.source:
        raise SettingsError(f"{file}: eval.path is empty; set it to a file of held-out prompts")
    if policy is None and not engine:
        raise SettingsError("give a policy with --policy PATH, or an engine that serves one with --engine URL")
    sections = (EVAL_SECTION,) if policy is not None and engine else (EVAL_SECTION, MODEL_SECTION)
    settings = resolve_names(settings, known_values(settings), print_note, sections)
    model = find_policy_folder(policy) if policy is not None else None
    found = run_async(lambda: evaluate(settings, model, engine))
    if as_json:
        print_json(found)
    else:
        _show(found, settings, str(model or engine))
    return ExitCode.SUCCESS


def find_policy_folder(path: Path) -> Path:
    """Return the model folder of a model, a checkpoint, or a run (its latest checkpoint). Blocks.

    Args:
        path: one of them, or the name of a model on the hub, which is downloaded.

    Raises:
        SettingsError: there is no model, or only an adapter.
        PenstockError: the model cannot be downloaded.
    """
    found = path = find_model(str(path), print_note)
    if (path / MANIFEST).is_file():
        found = path / MODEL
    elif (path / "checkpoints").is_dir() and not (path / "config.json").is_file():
        latest = CheckpointStore(path / "checkpoints").latest()
        found = path if latest is None else latest.model
    if is_adapter(found):
        raise SettingsError(
            f"{found} has only an adapter; merge it into a model with `penstock export` and give that folder"
        )
    if (found / "config.json").is_file():
        return found
    raise SettingsError(f"{path} has no policy: it is not a model folder, a checkpoint, or a run with a checkpoint")


async def evaluate(settings: Settings, model: Path | None, engine: str) -> EvaluationResult:
    """Sample and score every held-out prompt on one engine, and summarize.

    Args:
        settings: settings of a run, with `eval.path` or `eval.rows`.
        model: folder of the policy; None: the policy that the engine serves.
        engine: URL of the engine; empty: start one for the evaluation.
    """
    prompts = await anyio.to_thread.run_sync(_prompts, settings)
    if model is not None and settings.publishes_adapters:  # the policy is a whole model
        weights = msgspec.structs.replace(settings.weights, transport="files")
        settings = msgspec.structs.replace(settings, weights=weights, lora=LoraSettings())
    began = time.monotonic()

    async def use(url: str, version: int) -> EvaluationResult:
        tokenizer = model or settings.model.folder
        groups = await roll_out_and_score(
            settings.for_evaluation, [url], tokenizer, prompts, min_policy_version=version
        )
        outcomes = {group.prompt.id: evaluate_group(group, version, settings) for group in groups}
        names = {prompt.id: (prompt.environment or "", prompt.group_size) for prompt in prompts}
        score, environments = await anyio.to_thread.run_sync(summarize, outcomes, names)
        seconds = time.monotonic() - began
        return EvaluationResult(
            version=version, step=0, time=time.time(), seconds=seconds, overall=score, environments=environments
        )

    if engine or model is None:
        return await with_existing_engine(settings, engine, model, use)
    return await with_started_engine(settings, model, use)


def _prompts(settings: Settings) -> list[Prompt]:
    """Return the held-out prompts: those of the run if it has a folder, else new ones from the same settings."""
    with nullcontext(settings) if settings.run.name and settings.folder.is_dir() else temporary_folder(settings) as its:
        write_evaluation_rows(its)
        return read_evaluation_prompts(its)[0]


def _show(found: EvaluationResult, settings: Settings, what: str) -> None:
    console = Console(highlight=False)
    temperature = settings.eval.temperature
    console.print(
        Text.assemble(
            (what, "bold"),
            f" on {settings.eval.source}: {found.overall.prompts} prompts, ",
            f"{settings.eval.group_size} completions each, temperature {temperature:g}, {found.seconds:.1f} s",
        ),
        soft_wrap=True,
    )
    table = score_table(found)
    console.width = max(console.width, console.measure(table).maximum)
    console.print(table)
    if found.overall.invalid:
        reasons = format_counts(found.overall.invalid)
        console.print(Text(f"invalid: {reasons}; scores are over valid completions / over all", "bright_black"))


def score_table(found: EvaluationResult) -> Table:
    """Return a table with one row per environment and one for all.

    Where they differ, a cell has two scores: over valid completions and over all.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("")
    ks = list(found.overall.pass_at)
    for heading in ("prompts", "completions", "valid", "mixed", "mean", *(f"pass@{k}" for k in ks)):
        table.add_column(heading, justify="right")
    rows = {**found.environments, "all": found.overall} if len(found.environments) > 1 else {"all": found.overall}
    for name, score in rows.items():
        figures = [(score.mean_valid, score.mean_all)]
        figures += [(score.pass_at.get(k, {}).get("valid"), score.pass_at.get(k, {}).get("all")) for k in ks]
        table.add_row(
            Text(name, "bold"),
            *(f"{count:,}" for count in (score.prompts, score.n, score.valid)),
            Text(f"{score.mixed:,}", "yellow" if score.mixed else "bright_black"),
            *(_figure(*both) for both in figures),
        )
    return table


def _figure(valid: float | None, every: float | None) -> str:
    figures = ["-" if value is None else f"{value:.3f}" for value in (valid, every)]
    return " / ".join(dict.fromkeys(figures))
