"""Settings of the algorithm around the estimator and the loss, and published presets of rollout correction.

`decoupled_*` (three policies): the ratio is taken against the trainer's log-probs from before the first update, and
importance weights correct for the engine. `bypass_*` (two policies): the ratio is taken against the engine's log-probs
(`ppo_clip`), or there is no ratio and importance weights are the only correction (`pg`).

Source: verl, `verl/trainer/config/algorithm.py`, class RolloutCorrectionConfig.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Self

import msgspec
from msgspec import Struct, field

from stream.validity import TruncationReason
from workers.settings.section import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeLimit,
    PositiveLimit,
    Section,
)

Rule = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
    "m2po",
]
"""Rejection rules: level and estimator of the divergence between trainer and engine. `m2po` bounds the second moment
of the log-ratio."""


class Preset(NamedTuple):
    """Values that a preset's name stands for; the first four are keys of `[correction]`."""

    weights: Literal["none", "token", "sequence"] = "none"
    weight_range: tuple[float, float] = (0.0, 2.0)
    out_of_range: Literal["truncate", "zero"] = "truncate"
    reject: Mapping[Rule, tuple[float, float]] = MappingProxyType({})
    bypass: bool = False
    """The ratio is taken against the engine's log-probs."""
    loss: str = "clipped"
    """`clipped`: any loss with a ratio; `reinforce`: a loss without one."""


_GEOMETRIC: Final[Mapping[Rule, tuple[float, float]]] = {"seq_mean_k1": (0.999, 1.001)}
_K3: Final[Mapping[Rule, tuple[float, float]]] = {"seq_mean_k3": (0.0, 0.01)}

PRESETS: Final = MappingProxyType(
    {
        "disabled": Preset(),
        "decoupled_token_is": Preset("token"),
        "decoupled_seq_is": Preset("sequence"),
        "decoupled_token_icepop": Preset("token", weight_range=(0.5, 5.0), out_of_range="zero"),
        "decoupled_seq_is_rs": Preset("sequence", reject={"seq_sum_k1": (0.5, 2.0)}),
        "decoupled_geo_rs": Preset(reject=_GEOMETRIC),
        "decoupled_geo_rs_seq_tis": Preset("sequence", reject=_GEOMETRIC),
        "decoupled_geo_rs_token_tis": Preset("token", reject=_GEOMETRIC),
        "decoupled_k3_rs": Preset(reject=_K3),
        "decoupled_k3_rs_seq_tis": Preset("sequence", reject=_K3),
        "decoupled_k3_rs_token_tis": Preset("token", reject=_K3),
        "bypass_ppo_clip": Preset(bypass=True),
        "bypass_ppo_clip_geo_rs": Preset(reject=_GEOMETRIC, bypass=True),
        "bypass_ppo_clip_k3_rs": Preset(reject=_K3, bypass=True),
        "bypass_pg_is": Preset("sequence", bypass=True, loss="reinforce"),
        "bypass_pg_token_icepop": Preset(
            "token", weight_range=(0.5, 5.0), out_of_range="zero", bypass=True, loss="reinforce"
        ),
        "bypass_pg_geo_rs": Preset(reject=_GEOMETRIC, bypass=True, loss="reinforce"),
        "bypass_pg_geo_rs_seq_tis": Preset("sequence", reject=_GEOMETRIC, bypass=True, loss="reinforce"),
        "bypass_pg_geo_rs_token_tis": Preset("token", reject=_GEOMETRIC, bypass=True, loss="reinforce"),
    }
)
"""Presets by name."""


TruncationPolicy = Literal["exclude", "keep", "zero_reward", "zero_reward_in_baseline", "penalty", "baseline_only"]
Level = Literal["none", "group", "batch"]
MeanLevel = Literal["none", "group", "batch", "group_leave_one_out", "batch_leave_one_out"]
Aggregation = Literal[
    "auto", "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
Range = tuple[float, float]
PositiveRange = tuple[NonNegativeLimit, PositiveLimit]


class Normalization(Struct, frozen=True, kw_only=True):
    """Keyword arguments of a normalizer."""

    mean: Level = "none"
    std: Level = "none"
    leave_one_out: bool = False
    unbiased: bool = True
    """Divide the sum of squares by n - 1."""
    epsilon: float = 1e-5
    """Added to the standard deviation."""

    @classmethod
    def from_levels(cls, levels: tuple[MeanLevel, Level]) -> Self:
        """Build it from the pair in the settings, for example `("group_leave_one_out", "none")`."""
        mean, std = levels
        level: Level = "none" if mean == "none" else "group" if mean.startswith("group") else "batch"
        return cls(mean=level, std=std, leave_one_out=mean.endswith("leave_one_out"))


class AlgorithmSettings(Section, frozen=True):
    """`[algorithm]`: rewards, KL, entropy, truncation and aggregation."""

    kl_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence from the initial policy; 0: no reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"
    """KL estimator; with `+` the value of that estimator and the gradient of k2."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    aggregation: Aggregation = "auto"
    """How token losses are averaged; `auto`: as the loss defines it, else `token-mean`. `seq-mean-token-sum-norm`
    divides by `rollout.max_tokens`."""
    proximal: Literal["recompute", "interpolate", "engine"] = "recompute"
    """Log-probs in the denominator of the ratio. `recompute`: the trainer's before the first update; `interpolate`:
    between the engine's and the trainer's by the age of each token; `engine`: the engine's."""
    reward_clip: PositiveLimit = float("inf")
    """Rewards are clipped to ± this value; with rewards per turn, the return of each turn is."""
    overlong_penalty: tuple[NonNegativeInt, NonNegativeFloat] = (0, 1.0)
    """`[tokens, penalty]`: over the last `tokens` tokens before `rollout.max_tokens` a penalty for length grows
    from 0 to `penalty` (DAPO's soft overlong punishment), also of the greedy completion of `remax`; 0 tokens: none."""
    reward_normalization: tuple[MeanLevel, Level] = ("none", "none")
    """`[mean, std]`: subtract the mean and divide by the standard deviation of the group or the batch. The mean may
    also be `group_leave_one_out` or `batch_leave_one_out`. Rewards per turn are divided like the reward that they add
    up to."""
    advantage_normalization: tuple[MeanLevel, Level] = ("none", "none")
    """As `reward_normalization`, over the advantages of tokens."""
    success_threshold: FiniteFloat = 1.0
    """Reward from which a completion counts as correct, for pass@k."""
    truncation: dict[TruncationReason, TruncationPolicy] = field(default_factory=dict)
    """Treatment of truncated completions by reason; default `keep`, and `exclude` for `wall_clock`. `zero_reward`: they
    are trained as if they had earned 0, and count in no mean or standard deviation."""
    single_sample_policy: Literal["zero", "drop", "raw"] = "zero"
    """A group with one valid completion: advantage 0, drop the group, or the raw reward as advantage."""


class FilterSettings(Section, frozen=True):
    """`[filter]`: groups to drop before training. They free their capacity and are counted by reason."""

    min_valid_rows: NonNegativeInt = 0
    """Drop groups with fewer valid completions; 0: max(2, half the group size, rounded up), or 1 with estimators that
    do not compare within a group."""
    zero_variance: bool = True
    """Drop groups whose valid rewards are all equal, with estimators that compare within a group."""
    mean_reward_range: Range = (float("-inf"), float("inf"))
    """`[low, high]`: drop groups whose mean reward is outside."""
    advantage_range: PositiveRange = (0.0, float("inf"))
    """`[low, high]`: drop groups whose largest absolute advantage is outside."""


class RejectionBounds(NamedTuple):
    """A rejection rule and its bounds. For k1 they bound the ratio engine / trainer; other rules use `upper` only."""

    rule: Rule
    lower: float
    upper: float


class CorrectionSettings(Section, frozen=True):
    """`[correction]`: correct for the difference between the sampling policy and the trained policy."""

    preset: str = ""
    """A published combination of the keys below (`penstock algorithms` lists them); leave the others out then."""
    weights: Literal["none", "token", "sequence", "token-normalized", "sequence-normalized"] = "token"
    """Importance weights trainer / engine, for each token or for the whole completion; `-normalized` divides them by
    their mean over the batch, after rejection."""
    weight_range: PositiveRange = (0.0, 2.0)
    """`[low, high]` of importance weights."""
    out_of_range: Literal["truncate", "zero"] = "truncate"
    """Weights outside `weight_range`: clip them to the bound, or set them to 0."""
    reject: dict[Rule, PositiveRange] = field(default_factory=dict)
    """Rejection rules, each with `[low, high]`: `{ seq_mean_k1 = [0.99, 1.01], seq_max_k3 = [0.0, 10.0] }`. For k1 they
    bound the ratio engine / trainer; the other rules have no lower bound. A token must pass all of them."""

    def resolved(self) -> Self:
        """Return a copy with the preset's keys in place of its name.

        Raises:
            KeyError: there is no such preset.
        """
        if not self.preset:
            return self
        preset = PRESETS[self.preset]
        resolved: Self = msgspec.structs.replace(
            self,
            preset="",
            weights=preset.weights,
            weight_range=preset.weight_range,
            out_of_range=preset.out_of_range,
            reject=dict(preset.reject),
        )
        return resolved

    @property
    def rejections(self) -> tuple[RejectionBounds, ...]:
        """The rejection rules of the preset, or of `reject`."""
        return tuple(RejectionBounds(rule, *bounds) for rule, bounds in self.resolved().reject.items())

    @property
    def level(self) -> Literal["none", "token", "sequence"]:
        """Level of the importance weights."""
        level: Literal["none", "token", "sequence"] = self.weights.removesuffix("-normalized")  # type: ignore[assignment]
        return level

    @property
    def normalize(self) -> bool:
        """Weights are divided by their mean over the batch."""
        return self.weights.endswith("-normalized")
