"""All settings of a run, and values derived from them."""

import hashlib
import math
from pathlib import Path
from types import UnionType
from typing import Final, get_args

import msgspec
from msgspec import field

from stream.errors import SettingsError
from stream.validity import TruncationReason
from workers.settings.algorithm import AlgorithmSettings, CorrectionSettings, FilterSettings, TruncationPolicy
from workers.settings.data import ENVIRONMENT_ROWS, DatasetSettings, DataSettings, EnvironmentSettings, RewardSettings
from workers.settings.estimator_options import Estimator, Grpo
from workers.settings.loss_options import Clipped, Loss
from workers.settings.rollout import AgentSettings, EvalSettings, PacingSettings, RolloutSettings
from workers.settings.run import (
    AbortSettings,
    ArchiveSettings,
    ModelSettings,
    QueueSettings,
    RunSettings,
    ScoreSettings,
    StorageSettings,
)
from workers.settings.sandboxes import SandboxSettings
from workers.settings.section import Section
from workers.settings.training import EngineSettings, LoraSettings, TrainSettings, WeightsSettings

RUNS: Final = Path("runs")
"""Folder of runs that name no other, in the working directory."""
PROMPT_TOKENS: Final = 1024
"""Room for the prompt in a started engine, unless `engine.max_model_len` is set."""
EVALUATION_FRACTION: Final = 0.25
"""Share of a worker's groups in flight that a running evaluation uses."""
_LEAST_HANG_TIMEOUT_S: Final = 60.0
ABORT_WINDOW_BATCHES: Final = 4
"""Optimizer batches whose groups `abort.max_invalid_fraction` looks at."""


class Settings(Section, frozen=True, kw_only=True):
    """The settings file."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings
    data: DataSettings = field(default_factory=DataSettings)
    environments: dict[str, str | EnvironmentSettings] = field(default_factory=dict)
    """Environments by name: `NAME = "REF"`, or a table with `ref` and `args` for its factory. A row's `environment`
    column selects one; the first is the default."""
    rewards: tuple[RewardSettings, ...] = ()
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    agents: AgentSettings = field(default_factory=AgentSettings)
    sandboxes: SandboxSettings = field(default_factory=SandboxSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    score: ScoreSettings = field(default_factory=ScoreSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    weights: WeightsSettings = field(default_factory=WeightsSettings)
    estimator: Estimator = field(default_factory=Grpo)
    """Advantage estimator."""
    loss: Loss = field(default_factory=Clipped)
    """Policy loss."""
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    filter: FilterSettings = field(default_factory=FilterSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    pacing: PacingSettings = field(default_factory=PacingSettings)
    archive: ArchiveSettings = field(default_factory=ArchiveSettings)
    storage: StorageSettings = field(default_factory=StorageSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    abort: AbortSettings = field(default_factory=AbortSettings)

    @property
    def folder(self) -> Path:
        """The run's folder.

        Raises:
            SettingsError: the run has no name.
        """
        if not self.run.name:
            raise SettingsError("run.name is empty: set it in the settings file, or add --set run.name=NAME")
        return Path(self.run.folder or RUNS / self.run.name)

    @property
    def datasets(self) -> tuple[DatasetSettings, ...]:
        """All data sets: the tables of `data.sets`, the one of `data.path` or `data.rows`, or the environments' own."""
        data, sets = self.data, self.data.sets
        if not sets and (data.path or data.rows):
            place = {key: getattr(data, key) for key in ("path", "rows", "config", "split", "revision")}
            sets = (DatasetSettings(**place),)
        sets = sets or tuple(DatasetSettings(environment=name) for name in self.environments)
        return tuple(each if each.path or each.rows else self._environment_rows(each) for each in sets)

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence in a started engine, prompt included."""
        return self.engine.max_model_len or self.rollout.max_tokens + PROMPT_TOKENS

    @property
    def engine_wait_s(self) -> float:
        """Time to wait while no engine answers. vLLM needs longer, because it may be loading its model again."""
        wait_s = self.queue.reconnect_timeout_s
        return max(wait_s, self.engine.start_timeout_s) if self.engine.server == "vllm" else wait_s

    @property
    def hang_timeout_s(self) -> float:
        """Longest time for which the event loop of a role may stand still."""
        calls = (self.rollout.call_timeout_s, *(each.timeout_s for each in self.rewards))
        return self.queue.hang_timeout_s or max(_LEAST_HANG_TIMEOUT_S, 2 * max(calls))

    @property
    def groups_per_version(self) -> int:
        """Groups that are trained between two published policy versions."""
        return self.train.batch_size * self.train.publish_every

    @property
    def capacity(self) -> int:
        """Largest number of outstanding groups: (max_staleness + 1) x groups per version."""
        return (self.pacing.max_staleness + 1) * self.groups_per_version

    @property
    def abort_window_groups(self) -> int:
        """Groups of one environment that `abort.max_invalid_fraction` looks at."""
        return ABORT_WINDOW_BATCHES * self.train.batch_size

    @property
    def min_valid_rows(self) -> int:
        """Valid completions that a group needs to be trained."""
        half = max(2, math.ceil(self.rollout.group_size / 2))
        return self.filter.min_valid_rows or (half if self.estimator.within_group else 1)

    @property
    def drops_zero_variance(self) -> bool:
        """Groups whose rewards are all equal are dropped."""
        return self.filter.zero_variance and self.estimator.within_group

    @property
    def divides_by_group_std(self) -> bool:
        """Advantages are in units of the standard deviation of their group."""
        algorithm = self.algorithm
        if isinstance(self.estimator, Grpo) and self.estimator.normalize_std:
            return True
        return "group" in (algorithm.reward_normalization[1], algorithm.advantage_normalization[1])

    @property
    def aggregation(self) -> str:
        """Name of the loss aggregation, `auto` resolved."""
        chosen = self.algorithm.aggregation
        return chosen if chosen != "auto" else self.loss.aggregation or "token-mean"

    @property
    def ratios_move(self) -> bool:
        """Ratios of the policy in training to the proximal policy may differ from 1."""
        return self.algorithm.proximal != "recompute" or self.train.updates_per_batch > 1

    @property
    def opt_out_risks(self) -> list[str]:
        """Settings under which completions that bear no loss may gain on the average valid one, each with the reason.

        An invalid completion bears no loss, as if its advantage were 0. A policy that can cause failures learns to, if
        the first token of a valid completion has a negative advantage on average.
        """
        estimator, algorithm = self.estimator, self.algorithm
        risks = [f"estimator.name = '{estimator.name}': {estimator.opt_out}"] if estimator.opt_out else []
        if estimator.options.get("center") == "tokens":
            risks.append("estimator.center = 'tokens': long completions count more in the mean that is subtracted")
        if self.aggregation == "seq-mean-token-mean":
            risks.append(
                "algorithm.aggregation = 'seq-mean-token-mean'"
                + (f" (of loss.name = '{self.loss.name}')" if self.loss.aggregation else "")
                + ": a token of a short completion weighs more"
            )
        if algorithm.advantage_normalization[0] != "none":
            risks.append("algorithm.advantage_normalization subtracts a mean in which long completions count more")
        return risks

    @property
    def truncated_sampling(self) -> list[str]:
        """Keys of `rollout.sampling` by which the sampled distribution differs from the trained one."""
        return self.rollout.sampling.non_default("top_p", "top_k", "min_p", "min_tokens", "logit_bias")

    @property
    def publishes_adapters(self) -> bool:
        """Engines get LoRA adapters instead of whole weights."""
        if self.weights.transport == "auto" and self.weights.kv_cache == "recompute":
            return bool(self.lora.rank) and self.engine.server == "local" and not self.engine.urls
        return self.weights.transport == "adapter"

    @property
    def for_evaluation(self) -> "Settings":
        """Return a copy that samples the held-out prompts of `[eval]`; everything else is as in training."""
        replace, count = msgspec.structs.replace, self.eval.rows
        place = {key: getattr(self.eval, key) for key in ("path", "config", "split", "revision")}
        own = [DatasetSettings(environment=name, name=f"{name}-eval") for name in self.environments if count]
        sets = tuple(self._environment_rows(each, f"-{count}") for each in own)
        return replace(
            self,
            data=replace(self.data, **place, rows=0, sets=sets, epochs=1, shuffle=False),
            rollout=replace(self.rollout, group_size=self.eval.group_size, temperature=self.eval.temperature),
        )

    @property
    def evaluation_digest(self) -> str:
        """Digest of the settings that determine the held-out prompts; with their file it identifies them."""
        held_out = self.eval
        named = (held_out.source, held_out.config, held_out.revision, held_out.group_size)
        made_by = (*named, self.data, self.run.seed, list(self.environments))
        return hashlib.blake2b(msgspec.json.encode(made_by), digest_size=8).hexdigest()

    def _environment_rows(self, dataset: DatasetSettings, suffix: str = "") -> DatasetSettings:
        """Return a data set whose path is the file with the rows that its environment returned."""
        name = dataset.name or dataset.environment
        file = Path(self.run.folder or f"runs/{self.run.name}") / "rows" / f"{name}{suffix}.jsonl"
        return msgspec.structs.replace(dataset, name=name, path=f"{ENVIRONMENT_ROWS}{file}")

    def evaluation_groups_in_flight(self, groups_in_flight: int) -> int:
        """Groups of an evaluation that one worker processes concurrently, out of all its groups in flight."""
        return max(1, round(EVALUATION_FRACTION * groups_in_flight))

    def truncation_policy(self, reason: TruncationReason) -> TruncationPolicy:
        """Treatment of completions that were truncated for this reason."""
        default: TruncationPolicy = "exclude" if reason is TruncationReason.WALL_CLOCK else "keep"
        return self.algorithm.truncation.get(reason, default)


def sections() -> dict[str, list[type[Section]]]:
    """Return the tables of the file in order, each with its class; `estimator` and `loss` have one class per name."""
    found: dict[str, list[type[Section]]] = {}
    for table in msgspec.structs.fields(Settings):
        kind = RewardSettings if table.name == "rewards" else table.type
        kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        found[table.name] = [k for k in kinds if isinstance(k, type) and issubclass(k, Section)]
    return found


def setting_keys() -> list[str]:
    """Return every key as `section.key`, in file order, without the options of estimators and losses."""
    found = []
    for name, kinds in sections().items():
        if len(kinds) > 1:
            found.append(f"{name}.name")
        else:
            found += [f"{name}.{key.name}" for kind in kinds for key in msgspec.structs.fields(kind)] or [name]
    return found
