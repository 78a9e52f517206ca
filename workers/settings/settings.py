"""All settings of a run, and what follows from them."""

import hashlib
import math
from pathlib import Path
from types import UnionType
from typing import get_args

import msgspec
from msgspec import field

from stream.validity import TruncationReason
from workers.settings.algorithm import (
    Algorithm,
    Correction,
    Critic,
    Filter,
    Normalization,
    Shaping,
    TruncationPolicy,
)
from workers.settings.data import Data, EnvironmentSettings, RewardSettings
from workers.settings.engine import Engine
from workers.settings.estimators import Estimator, Grpo
from workers.settings.losses import Clipped, Loss
from workers.settings.pipeline import Archive, Delivery, Guard, Model, Run, Score
from workers.settings.rollout import Eval, Pacing, Rollout
from workers.settings.section import Section
from workers.settings.training import Lora, Train, Weights


class Settings(Section, frozen=True, kw_only=True):
    """The whole file."""

    run: Run = field(default_factory=Run)
    model: Model
    data: Data
    environments: dict[str, str | EnvironmentSettings] = field(default_factory=dict)
    """Environments by name, each a reference, or a table with `ref` and `args` for its factory; a row's `environment`
    column picks one, the first is the default."""
    rewards: tuple[RewardSettings, ...] = ()
    rollout: Rollout = field(default_factory=Rollout)
    engine: Engine = field(default_factory=Engine)
    score: Score = field(default_factory=Score)
    eval: Eval = field(default_factory=Eval)
    train: Train = field(default_factory=Train)
    lora: Lora = field(default_factory=Lora)
    weights: Weights = field(default_factory=Weights)
    estimator: Estimator = field(default_factory=Grpo)
    """Of advantages."""
    loss: Loss = field(default_factory=Clipped)
    """Of the policy."""
    algorithm: Algorithm = field(default_factory=Algorithm)
    filter: Filter = field(default_factory=Filter)
    shaping: Shaping = field(default_factory=Shaping)
    reward_normalization: Normalization = field(default_factory=Normalization)
    advantage_normalization: Normalization = field(default_factory=Normalization)
    correction: Correction = field(default_factory=Correction)
    critic: Critic = field(default_factory=Critic)
    pacing: Pacing = field(default_factory=Pacing)
    archive: Archive = field(default_factory=Archive)
    delivery: Delivery = field(default_factory=Delivery)
    guard: Guard = field(default_factory=Guard)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run.folder or f"runs/{self.run.name}")

    @property
    def engine_wait_s(self) -> float:
        """How long to wait while no engine answers: vLLM takes its time to start again."""
        waits = self.delivery.reconnect_s
        return max(waits, self.engine.start_timeout_s) if self.engine.server == "vllm" else waits

    @property
    def groups_per_version(self) -> int:
        """Groups trained between two publications."""
        return self.train.groups_per_step * self.train.publish_every

    @property
    def capacity(self) -> int:
        """Groups that may be outstanding: (max_staleness + 1) x groups per version."""
        return (self.pacing.max_staleness + 1) * self.groups_per_version

    @property
    def min_valid_rows(self) -> int:
        """Valid rows that a group needs in order to be trained."""
        half = max(2, math.ceil(self.rollout.group_size / 2))
        return self.filter.min_valid_rows or (half if self.estimator.within_group else 1)

    @property
    def drops_zero_variance(self) -> bool:
        """Whether groups whose rewards are all equal are dropped."""
        return self.filter.zero_variance and self.estimator.within_group

    @property
    def aggregation(self) -> str:
        """Name of the loss's aggregation."""
        chosen = self.algorithm.aggregation
        return chosen if chosen != "auto" else self.loss.aggregation or "token-mean"

    @property
    def publishes_adapters(self) -> bool:
        """Whether engines are given an adapter to each policy version, and no whole weights."""
        return self.lora.rank > 0 and self.lora.publish == "adapter"

    @property
    def for_evaluation(self) -> "Settings":
        """The same with the held-out prompts in the place of the run's own; all else is as in training."""
        replace = msgspec.structs.replace
        return replace(
            self,
            data=replace(self.data, path=self.eval.path, mix=(), name="", epochs=1, shuffle=False),
            rollout=replace(self.rollout, group_size=self.eval.group_size, temperature=self.eval.temperature),
        )

    @property
    def evaluation_digest(self) -> str:
        """What the held-out prompts hang on, besides their file: a digest, by which a trainer knows them."""
        made_by = (self.eval.path, self.eval.group_size, self.data, self.run.seed, list(self.environments))
        return hashlib.blake2b(msgspec.json.encode(made_by), digest_size=8).hexdigest()

    def evaluation_groups_in_flight(self, groups_in_flight: int) -> int:
        """Groups of an evaluation that one worker works on, of so many in all."""
        return max(1, min(groups_in_flight - 1, round(self.eval.share * groups_in_flight)))

    def truncation_policy(self, reason: TruncationReason) -> TruncationPolicy:
        """What becomes of a row that was cut short for this reason."""
        default: TruncationPolicy = "exclude" if reason is TruncationReason.WALL_CLOCK else "keep"
        return self.algorithm.truncation.get(reason, default)


def sections() -> dict[str, list[type[Section]]]:
    """The tables of the file in order, each with its class; the two that pick a function, with all of theirs."""
    found: dict[str, list[type[Section]]] = {}
    for table in msgspec.structs.fields(Settings):
        kind = RewardSettings if table.name == "rewards" else table.type
        kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        found[table.name] = [k for k in kinds if isinstance(k, type) and issubclass(k, Section)]
    return found


def setting_keys() -> list[str]:
    """Every key, as `section.key`, in the order of the file; options of estimators and losses are not among them."""
    found = []
    for name, kinds in sections().items():
        if len(kinds) > 1:
            found.append(f"{name}.name")
        else:
            found += [f"{name}.{key.name}" for kind in kinds for key in msgspec.structs.fields(kind)] or [name]
    return found
