"""What the trainer does with rewards and log-probs around the estimator and the loss."""

from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta, field

from stream.validity import TruncationReason
from workers.settings.presets import PRESETS, Rule
from workers.settings.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

TruncationPolicy = Literal["exclude", "keep", "zero_reward", "penalty", "baseline_only"]
Level = Literal["none", "group", "batch"]
Aggregation = Literal[
    "auto", "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


class Algorithm(Section, frozen=True):
    """`[algorithm]`: what counts, and what is added to the policy loss."""

    aggregation: Aggregation = "auto"
    """How much of the loss each token is; `auto`: what the loss is defined with, `token-mean` where that is any."""
    aggregation_constant: NonNegativeInt = 0
    """What `seq-mean-token-sum-norm` divides by; 0: `rollout.max_tokens`."""
    proximal: Literal["recompute", "interpolate", "engine"] = "recompute"
    """Log-probs that ratios are taken against: the trainer's when the batch is formed, between the engine's and the
    trainer's by the age of each token, or the engine's."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Of the divergence from the policy that the run began with."""
    kl_divergence: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"
    """Its estimator; with `+` the value of that one and the gradient of k2."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Of the entropy bonus."""
    correct_at: float = 1.0
    """A completion whose reward is at least this is right: for pass@k."""
    truncation: dict[TruncationReason, TruncationPolicy] = field(default_factory=dict)
    """Policy by reason; `keep` unless set, `wall_clock` `exclude` unless set."""
    singleton: Literal["zero", "drop", "raw"] = "zero"
    """A group with one valid row: advantage 0, dropped, or its own reward."""


class Filter(Section, frozen=True):
    """`[filter]`: groups that are not worth training; they give their place back, and are counted by reason."""

    min_valid_rows: NonNegativeInt = 0
    """Groups with fewer valid completions are dropped; 0: max(2, half the group size, rounded up), or 1 with estimators
    that do not compare within a group."""
    zero_variance: bool = True
    """Drop groups whose valid rewards are all equal, with estimators that compare within a group."""
    min_mean_reward: float = float("-inf")
    """Drop groups that are too hard: mean reward below it."""
    max_mean_reward: float = float("inf")
    """Drop groups that are too easy: mean reward above it."""
    min_advantage: NonNegativeFloat = 0.0
    """Drop groups whose largest advantage, up or down, is below it."""
    max_advantage: PositiveFloat = float("inf")
    """Drop groups whose largest advantage, up or down, is above it."""


class Shaping(Section, frozen=True):
    """`[shaping]`: what is done to rewards before they are compared: first overlong, then bias and scale, then clip."""

    bias: float = 0.0
    """Added to a reward."""
    scale: float = 1.0
    """What the sum is multiplied by."""
    clip: PositiveFloat = float("inf")
    """Rewards are clipped to ± this."""
    overlong_tokens: NonNegativeInt = 0
    """Sampled tokens before `rollout.max_tokens` over which the penalty for length grows from 0 to whole; 0: none."""
    overlong_penalty: NonNegativeFloat = 1.0
    """The whole penalty."""


class Normalization(Section, frozen=True):
    """`[reward_normalization]`, `[advantage_normalization]`: by mean and standard deviation, of the level chosen."""

    mean: Level = "none"
    """Subtract the mean of the group, or of the batch."""
    std: Level = "none"
    """Divide by the standard deviation around that mean, of the group or of the batch."""
    leave_one_out: bool = False
    """The mean of the others."""
    unbiased: bool = True
    """Divide the sum of squares by n - 1."""
    epsilon: PositiveFloat = 1e-5
    """Added to the standard deviation."""


class Rejection(Section, frozen=True):
    """`[[correction.reject]]`: one rule; a token must pass all of them."""

    rule: Rule
    """Level and estimator of the divergence between trainer and engine; `m2po` bounds the second moment."""
    lower: NonNegativeFloat = 0.0
    """For k1, the least ratio engine / trainer; not used by the others."""
    upper: PositiveFloat = 2.0
    """For k1, the largest ratio engine / trainer; for k2, k3 and m2po the largest value."""


class Correction(Section, frozen=True):
    """`[correction]`: of the difference between the policy that sampled and the one that is trained."""

    preset: Annotated[str, Meta(pattern=r"^[a-z0-9_]*$")] = ""
    """A published set of the keys below by name (see `penstock algorithms`); leave the others out then."""
    weights: Literal["none", "token", "sequence"] = "token"
    """Importance weights trainer / engine, of each token or of the whole completion."""
    lower: NonNegativeFloat = 0.0
    """Weights below are set to 0 with `outside = "zero"`, else raised to it."""
    upper: PositiveFloat = 2.0
    """Weights above are set to 0 with `outside = "zero"`, else cut to it."""
    outside: Literal["truncate", "zero"] = "truncate"
    """What becomes of a weight out of bounds."""
    normalize: bool = False
    """Divide weights by their mean over the batch, after rejection."""
    reject: tuple[Rejection, ...] = ()
    """Rules that take tokens, or whole completions, out of the batch before anything is compared."""

    def resolved(self) -> Self:
        """The same with the preset's keys in place of its name.

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
            lower=preset.lower,
            upper=preset.upper,
            outside=preset.out_of_range,
            normalize=preset.normalize,
            reject=tuple(Rejection(rule=rule, lower=lower, upper=upper) for rule, lower, upper in preset.reject),
        )
        return resolved


class Critic(Section, frozen=True):
    """`[critic]`: the value head that `gae` trains beside the policy, on its last hidden states."""

    width: PositiveInt = 128
    """Units of its hidden layer."""
    learning_rate: NonNegativeFloat = 1e-3
    """Of its own AdamW."""
    value_clip: PositiveFloat = float("inf")
    """A value may move this far from its old one before its loss is clipped."""
