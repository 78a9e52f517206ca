"""The model card of an exported policy: what it was trained on and how, how good it is, and how to make it again.

A card is a README.md with metadata in YAML, which the Hugging Face Hub and its clients read. Names, paths and reasons
come from data, models and user code, so every text is escaped before it gets into YAML or Markdown.
"""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import tomli_w
from msgspec import Struct

from stream.errors import PenstockError
from workers.runs.evaluations import EvaluationResult, EvaluationStats, mean_interval, read_evaluations, read_groups
from workers.runs.progress import Progress
from workers.settings import Settings
from workers.settings.data import ENVIRONMENT_ROWS, DatasetSettings, RewardSettings
from workers.settings.hub import is_hub_name, parse_revision
from workers.settings.rollout import EvalSettings
from workers.settings.run import ModelSettings
from workers.settings.toml_file import DEFAULT_OPTIONS, dump_redacted, dump_settings, load_settings
from workers.train.checkpointing.markdown import (
    escape_markdown,
    fenced,
    figure,
    identifier,
    one_line,
    render_card,
    table,
)

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

CARD: Final = "README.md"
_CACHED: Final = re.compile(r"models--([\w.-]+?)--([\w.-]+)\Z", re.ASCII)
"""Folder of a model in the cache of the hub's client."""
_STATES: Final = {
    "valid": "trained on",
    "failed": "the episode failed",
    "reward": "the reward could not be measured",
    "truncated": "cut off by a limit, which these settings exclude",
    "rejected": "rejected by a rule of [correction]",
    "dropped": "dropped by the training step",
}
"""What a state means, by its first word."""

_OF_THIS_MACHINE: Final = {
    "run": ("folder", "redis", "address", "metrics_address", "dashboard", "threads"),
    "engine": ("urls", "python"),
    "storage": ("url",),
}
"""Settings that say where a run was, and nothing about its result."""


def write_cards(run_folder: Path, out: Path, step: int, progress: Progress) -> None:
    """Write the model card of an export, and one for the adapter if the export has one.

    Args:
        run_folder: the run's folder. Its settings and evaluations are left out where they cannot be read.
        out: folder of the export.
        step: of the exported checkpoint.
        progress: of that checkpoint.
    """
    content = _Card.read(run_folder, step, progress)
    (out / CARD).write_text(content.render(library="transformers"), encoding="utf-8")
    if (out / "adapter").is_dir():
        (out / "adapter" / CARD).write_text(content.render(library="peft"), encoding="utf-8")


class _Score(Struct, frozen=True, kw_only=True):
    """A score on held-out prompts."""

    step: int
    environment: str
    """Empty: over all of them."""
    stats: EvaluationStats
    interval: tuple[float, float] | None


class _Base(Struct, frozen=True, kw_only=True):
    """The model from which training started."""

    path: str = ""
    hub_name: str = ""
    """`owner/name` on the hub; empty: unknown."""
    license: str = ""
    license_name: str = ""
    language: tuple[str, ...] = ()


class _Card(Struct, frozen=True, kw_only=True):
    """What a card says."""

    name: str
    step: int
    progress: Progress
    settings: Settings | None
    base: _Base
    scores: list[_Score]
    """Of the first evaluation, and of the weights that were exported."""

    @classmethod
    def read(cls, folder: Path, step: int, progress: Progress) -> "_Card":
        try:
            settings = load_settings(folder / "run.toml")
        except PenstockError:
            settings = None
        evaluations = read_evaluations(folder)
        shown = {
            each.step: each for each in [*evaluations[:1], *evaluations] if each.step in {step, evaluations[0].step}
        }
        return cls(
            name=settings.run.name if settings and settings.run.name else folder.resolve().name,
            step=step,
            progress=progress,
            settings=settings,
            base=_read_base(settings.model) if settings else _Base(),
            scores=[score for number in sorted(shown) for score in _scores(folder, shown[number])],
        )

    def render(self, *, library: str) -> str:
        """Return the card for the merged model (`transformers`) or for the adapter (`peft`)."""
        return render_card(self._metadata(library), "\n\n".join(self._paragraphs(library)) + "\n")

    def _metadata(self, library: str) -> "ModelCardData":
        from huggingface_hub import ModelCardData

        settings, base = self.settings, self.base
        results = [result for score in self.scores if score.step == self.step for result in self._results(score)]
        tags = ["penstock", "reinforcement-learning"]
        if settings:
            tags += [settings.estimator.name, *(["lora"] if settings.lora.rank else [])]
        datasets = [each.path.partition("#")[0] for each in settings.datasets if _is_on_hub(each)] if settings else []
        return ModelCardData(
            license=base.license or None,
            license_name=base.license_name or None,
            language=list(base.language) or None,
            base_model=base.hub_name or None,
            datasets=datasets or None,
            library_name=library,
            pipeline_tag="text-generation",
            tags=tags,
            model_name=one_line(self.name) if results else None,
            eval_results=results or None,
        )

    def _results(self, score: _Score) -> "Iterator[EvalResult]":
        """Yield a score in the hub's form, as entries of `model-index`."""
        from huggingface_hub import EvalResult

        if self.settings is None:
            return
        evaluation, stats = self.settings.eval, score.stats
        shared = {
            "prompts": stats.prompts,
            "completions": stats.n,
            "valid": stats.valid,
            "temperature": evaluation.temperature,
            "seed": self.settings.run.seed,
        }
        figures: dict[str, tuple[float | None, dict[str, Any]]] = {"mean_reward": (stats.mean_valid, shared)}
        if score.interval:
            figures["mean_reward"] = stats.mean_valid, shared | {"interval_95": [round(x, 6) for x in score.interval]}
        figures |= {f"pass@{k}": (both.get("valid"), shared) for k, both in stats.pass_at.items()}
        for kind, (value, arguments) in figures.items():
            if value is not None:
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=evaluation.path.partition("#")[0] if _is_on_hub(evaluation) else "held-out",
                    dataset_name=one_line(f"{score.environment} {evaluation.source}"),
                    metric_type=kind,
                    metric_value=round(value, 6),
                    metric_args=arguments,
                )

    def _paragraphs(self, library: str) -> Iterator[str]:
        """Yield the paragraphs of the card's text."""
        form = "LoRA adapter" if library == "peft" else "policy"
        base = self.base.hub_name or self.base.path
        yield f"# {escape_markdown(self.name)}"
        yield (
            f"A {form} trained by reinforcement learning with Penstock {version('penstock')}"
            + (f", from {escape_markdown(base)}" if base else "")
            + f". Weights after step {self.step:,}; policy version {self.progress.version}."
        )
        yield "## Scores"
        yield from self._score_paragraphs()
        yield "## Training"
        yield table(("", ""), self._training_rows())
        yield "## Completions by state"
        yield from self._state_paragraphs()
        yield "## How to make it again"
        yield from self._command_paragraphs()

    def _score_paragraphs(self) -> Iterator[str]:
        settings = self.settings
        if settings is None or not self.scores:
            mean = self.progress.mean_reward
            yield "It was not evaluated on held-out prompts." + (
                f" Mean reward in training, over the steps before this checkpoint: {mean:.3f}."
                if mean is not None
                else ""
            )
            return
        ks = list(dict.fromkeys(k for score in self.scores for k in score.stats.pass_at))
        rows = [
            (
                f"step {score.step:,}",
                score.environment or "all",
                f"{score.stats.prompts:,}",
                f"{score.stats.valid:,} of {score.stats.n:,}",
                figure(score.stats.mean_valid),
                " to ".join(map(figure, score.interval)) if score.interval else "unknown",
                *(figure(score.stats.pass_at.get(k, {}).get("valid")) for k in ks),
            )
            for score in self.scores
        ]
        heads = ("weights after", "environment", "prompts", "valid completions", "mean reward", "95 % interval")
        yield table((*heads, *(f"pass@{k}" for k in ks)), rows)
        missing = (
            "" if any(score.step == self.step for score in self.scores) else " The exported weights have no score."
        )
        evaluation = settings.eval
        yield (
            f"Held-out prompts: {escape_markdown(evaluation.source)}, {evaluation.group_size} completions each, "
            f"temperature {evaluation.temperature:g}. One run, with seed {settings.run.seed}. The interval is over "
            f"prompts, by the normal approximation; it does not contain the spread between seeds.{missing}"
        )

    def _training_rows(self) -> Iterator[tuple[str, str]]:
        progress, settings = self.progress, self.settings
        yield "optimizer steps", f"{progress.step:,}"
        yield "groups trained", f"{progress.groups:,}"
        yield "tokens sampled for them", f"{progress.tokens:,}"
        if progress.staleness_count:
            mean = progress.staleness_sum / progress.staleness_count
            yield (
                "policy versions between sampling and training",
                f"{mean:.2f} on average, at most {progress.staleness_max}",
            )
        if settings is None:
            return
        yield "data", ", ".join(map(_describe_data, settings.datasets))
        yield "environments", ", ".join(settings.environments) or "none"
        yield (
            "rewards",
            ", ".join(f"{each.name or each.ref} (weight {each.weight:g})" for each in settings.rewards)
            or ("the environments' own"),
        )
        yield "estimator", settings.estimator.name
        yield "loss", settings.loss.name
        yield "groups in a step", f"{settings.train.batch_size} with {settings.rollout.group_size} completions each"
        yield "learning rate", f"{settings.train.learning_rate:g}, {settings.train.schedule}"
        rank = settings.lora.rank
        yield "trained weights", f"LoRA, rank {rank}, alpha {settings.lora.alpha:g}" if rank else "all"

    def _state_paragraphs(self) -> Iterator[str]:
        states = self.progress.completion_states
        total = sum(states.values())
        if not total:
            yield "No completion was counted."
            return
        rows = [
            (state, f"{count:,}", f"{count / total:.2%}", _STATES.get(state.partition(":")[0], ""))
            for state, count in sorted(states.items(), key=lambda item: (item[0] != "valid", -item[1], item[0]))
        ]
        yield table(("state", "completions", "share", "meaning"), rows)
        yield (
            "Only valid completions bear loss. An unmeasured reward is never counted as 0: such a completion is masked "
            "out, and is in no baseline."
        )

    def _command_paragraphs(self) -> Iterator[str]:
        if self.settings is None:
            yield "The run's settings could not be read."
            return
        name = self.settings.run.name or self.name
        yield fenced(f"penstock run run.toml\npenstock export {name} OUT --which {self.step}", "sh")
        yield "`run.toml`, without what equals the defaults, and without addresses and secrets:"
        yield fenced(tomli_w.dumps(changed_settings(self.settings)).strip(), "toml")


def _describe_data(data: DatasetSettings) -> str:
    if data.rows:
        return f"{data.rows:,} problems made by {data.environment or 'the environment'}"
    if data.path.startswith(ENVIRONMENT_ROWS):
        return f"rows of {data.path.removeprefix(ENVIRONMENT_ROWS)}"
    return f"{data.path} ({data.environment})" if data.environment else data.path


def _scores(folder: Path, result: EvaluationResult) -> Iterator[_Score]:
    """Yield the score over all prompts, and that of each environment if there are several."""
    groups = read_groups(folder, result.step)
    parts = {"": result.overall} | (result.environments if len(result.environments) > 1 else {})
    for name, stats in parts.items():
        counted = [group for group in groups if not name or group.prompt.environment == name]
        interval = mean_interval(stats, result.version, counted)
        yield _Score(step=result.step, environment=name, stats=stats, interval=interval)


def _is_on_hub(named: ModelSettings | DatasetSettings | EvalSettings) -> bool:
    """Return whether the run used a model or a data set by its name on the hub."""
    return is_hub_name(named.path.partition("#")[0]) and bool(parse_revision(named.revision).commit)


def _read_base(model: ModelSettings) -> _Base:
    """Return what is known about a model, from its path and from its own card."""
    from huggingface_hub import ModelCard

    path, folder = model.path, model.folder
    cached = [match for part in folder.parts if (match := _CACHED.match(part))]
    hub_name = path if _is_on_hub(model) else "/".join(cached[-1].groups()) if cached else ""
    try:
        data = ModelCard((folder / CARD).read_text(encoding="utf-8"), ignore_metadata_errors=True).data
    except Exception:  # noqa: BLE001  (a stranger's YAML may raise anything; without it the card says less)
        return _Base(path=path, hub_name=hub_name)
    original = data.get("base_model")
    languages = data.get("language")
    known = original if isinstance(original, str) and is_hub_name(original) else ""
    return _Base(
        path=path,
        hub_name=hub_name or known,
        license=identifier(data.get("license")),
        license_name=identifier(data.get("license_name")),
        language=tuple(filter(None, map(identifier, languages if isinstance(languages, list) else [languages]))),
    )


def changed_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from their defaults as a table for other people.

    What belongs to one machine is left out: folders, addresses, servers. Secrets are hidden as in `dump_redacted`.
    """
    defaults = tomllib.loads(dump_settings(Settings(model=ModelSettings(path=""))))
    lists = {"rewards": RewardSettings(ref=""), "sets": DatasetSettings()}
    defaults |= {name: msgspec.json.decode(msgspec.json.encode(item)) for name, item in lists.items()}
    changed = _changed(tomllib.loads(dump_redacted(settings)), defaults)
    for section, keys in _OF_THIS_MACHINE.items():
        kept = {key: value for key, value in changed.pop(section, {}).items() if key not in keys}
        changed |= {section: kept} if kept else {}
    return {name: changed[name] for name in Settings.__struct_fields__ if name in changed}


def _changed(table: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return what differs from the defaults, in which a list of tables is represented by one table."""
    changed = {}
    for key, value in table.items():
        default = defaults.get(key)
        if key in DEFAULT_OPTIONS and isinstance(default, dict) and value.get("name") != default["name"]:
            changed[key] = value  # another estimator has other defaults
        elif isinstance(value, dict) and isinstance(default, dict):
            if inner := _changed(value, default):
                changed[key] = inner
        elif isinstance(value, list) and isinstance(default, dict):
            changed |= {key: [_changed(each, default) for each in value]} if value else {}
        elif value != default:
            changed[key] = value
    return changed
