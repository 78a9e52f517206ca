"""`[estimator]`: advantage estimators and their options.

There is one class for each name in `workers.train.algorithms.advantages.ESTIMATORS`. Its fields are the keyword-only
parameters of the registered function (a test compares them); their defaults are defined here.
"""

from typing import ClassVar, Literal

from workers.settings.section import (
    EstimatorOptions,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveLimit,
)

Center = Literal["completions", "tokens"]


class Grpo(EstimatorOptions, frozen=True, tag="grpo"):
    """GRPO: reward minus the mean of the group."""

    affine: ClassVar[bool] = True

    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    leave_one_out: bool = False
    """Use the mean of the other completions."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""


class DrGrpo(EstimatorOptions, frozen=True, tag="dr_grpo"):
    """Dr. GRPO: GRPO without the standard deviation; use it with aggregation `seq-mean-token-sum-norm`."""

    affine: ClassVar[bool] = True


class Rloo(EstimatorOptions, frozen=True, tag="rloo"):
    """RLOO: reward minus the mean of the other completions."""

    affine: ClassVar[bool] = True


class ReinforcePlusPlus(EstimatorOptions, frozen=True, tag="reinforce_plus_plus"):
    """REINFORCE++: discounted reward-to-go of each token, whitened over the batch."""

    within_group: ClassVar[bool] = False
    compares_group: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    opt_out: ClassVar[str] = "one baseline for all prompts, so completions of hard prompts are below it on average"

    discount: Fraction = 1.0
    """Discount factor per trainable token."""
    whiten: bool = True
    """Divide by the standard deviation over the batch's tokens, and subtract a mean (`center`)."""
    center: Center = "completions"
    """What the whitened advantages have mean 0 over: `completions`, each with its first token, so that a completion
    does not gain by being invalid; or `tokens`, as in verl, where long completions count more."""


class ReinforcePlusPlusBaseline(EstimatorOptions, frozen=True, tag="reinforce_plus_plus_baseline"):
    """REINFORCE++ baseline: reward minus the mean of the group, whitened over the batch's tokens."""

    affine: ClassVar[bool] = True
    within_group: ClassVar[bool] = False

    center: Center = "completions"
    """What the whitened advantages have mean 0 over: `completions`, each with its first token, so that a completion
    does not gain by being invalid; or `tokens`, as in verl, where long completions count more."""


class Gae(EstimatorOptions, frozen=True, tag="gae"):
    """Generalized advantage estimation, with a value head that is trained on the policy's last hidden states."""

    within_group: ClassVar[bool] = False
    compares_group: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    opt_out: ClassVar[str] = (
        "until the critic knows how hard each prompt is, hard prompts are below its value on average"
    )
    trainer_options: ClassVar[tuple[str, ...]] = ("critic_width", "critic_learning_rate", "critic_value_clip")

    discount: Fraction = 1.0
    """Discount factor per token."""
    gae_lambda: Fraction = 0.95
    """Lambda: 0 uses one step, 1 the whole episode."""
    whiten: bool = True
    """Divide by the standard deviation over the batch's tokens, and subtract a mean (`center`)."""
    center: Center = "completions"
    """What the whitened advantages have mean 0 over: `completions`, each with its first token, so that a completion
    does not gain by being invalid; or `tokens`, as in verl, where long completions count more."""
    critic_width: PositiveInt = 128
    """Hidden units of the value head."""
    critic_learning_rate: NonNegativeFloat = 1e-3
    """Learning rate of the value head's AdamW."""
    critic_value_clip: PositiveLimit = float("inf")
    """Distance from its old value at which a value is clipped in the loss."""


class Remax(EstimatorOptions, frozen=True, tag="remax"):
    """ReMax: reward minus that of a greedy completion of the same prompt."""

    within_group: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    opt_out: ClassVar[str] = "the greedy completion usually earns more than the average sampled one"


class Opo(EstimatorOptions, frozen=True, tag="opo"):
    """OPO: reward minus the length-weighted mean of the group."""

    affine: ClassVar[bool] = True
    opt_out: ClassVar[str] = "a baseline weighted by length, above the mean if long completions are the better ones"


class Gpg(EstimatorOptions, frozen=True, tag="gpg"):
    """GPG: reward minus the mean of the group, scaled up by the fraction of the batch whose reward is not 0."""

    affine: ClassVar[bool] = True
    within_group: ClassVar[bool] = False

    f_norm: PositiveFloat = 1.0
    """Divisor of the difference."""


class GrpoPassk(EstimatorOptions, frozen=True, tag="grpo_passk"):
    """Only the best completion of a group has an advantage: its lead over the second best."""

    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class Passk(EstimatorOptions, frozen=True, tag="passk"):
    """Analytic advantage of pass@k; `algorithm.success_threshold` decides what is correct."""

    reads: ClassVar[str] = "correct"

    k: PositiveInt = 4
    """Number k of attempts; one of them must be correct. At most `rollout.group_size`."""


class Gdpo(EstimatorOptions, frozen=True, tag="gdpo"):
    """GDPO: each reward part is normalized on its own, then weighted, summed and whitened."""

    within_group: ClassVar[bool] = False
    reads: ClassVar[str] = "parts"

    epsilon: PositiveFloat = 1e-6
    """Added to each standard deviation."""
    center: Center = "completions"
    """What the whitened advantages have mean 0 over: `completions`, each with its first token, so that a completion
    does not gain by being invalid; or `tokens`, as in verl, where long completions count more."""


class OptimalTokenBaseline(EstimatorOptions, frozen=True, tag="optimal_token_baseline"):
    """A baseline for each token position, weighted by the size of the gradient."""

    per_token: ClassVar[bool] = True

    zero_tail: bool = True
    """No baseline at positions that only one completion reaches."""
    epsilon: PositiveFloat = 1e-8
    """Added to the sum of weights."""


class TirOptimalTokenBaseline(EstimatorOptions, frozen=True, tag="tir_optimal_token_baseline"):
    """Optimal token baseline that counts only trainable tokens (for tool turns)."""

    per_token: ClassVar[bool] = True

    zero_tail: bool = True
    """No baseline at positions that only one completion reaches."""
    epsilon: PositiveFloat = 1e-8
    """Added to the sum of weights."""


class MaxRl(EstimatorOptions, frozen=True, tag="max_rl"):
    """MaxRL: reward minus the mean of the group, divided by that mean. Hard prompts weigh more; rewards are >= 0."""

    affine: ClassVar[bool] = True

    epsilon: PositiveFloat = 1e-6
    """Added to the mean."""


Estimator = (
    Grpo
    | DrGrpo
    | Rloo
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Gae
    | Remax
    | Opo
    | Gpg
    | GrpoPassk
    | Passk
    | Gdpo
    | OptimalTokenBaseline
    | TirOptimalTokenBaseline
    | MaxRl
)
"""Any estimator."""
