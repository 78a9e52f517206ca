"""`[estimator]`: advantage estimators and their options.

There is one class for each name in `workers.train.algorithms.advantages.ESTIMATORS`. Its fields are the keyword-only
parameters of the registered function (a test compares them); their defaults are defined here.
"""

from typing import ClassVar

from workers.settings.section import EstimatorChoice, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt


class Grpo(EstimatorChoice, frozen=True, tag="grpo"):
    """GRPO: reward minus the mean of the group."""

    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    leave_one_out: bool = False
    """Use the mean of the other completions."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""


class DrGrpo(EstimatorChoice, frozen=True, tag="dr_grpo"):
    """Dr. GRPO: GRPO without the standard deviation; use it with aggregation `seq-mean-token-sum-norm`."""


class Rloo(EstimatorChoice, frozen=True, tag="rloo"):
    """RLOO: reward minus the mean of the other completions."""


class ReinforcePlusPlus(EstimatorChoice, frozen=True, tag="reinforce_plus_plus"):
    """REINFORCE++: discounted reward-to-go of each token, whitened over the batch."""

    within_group: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    discount: Fraction = 1.0
    """Discount factor per trainable token."""
    whiten: bool = True
    """Normalize to mean 0 and variance 1 over the batch's tokens."""


class ReinforcePlusPlusBaseline(EstimatorChoice, frozen=True, tag="reinforce_plus_plus_baseline"):
    """REINFORCE++ baseline: reward minus the mean of the group, whitened over the batch's tokens."""

    within_group: ClassVar[bool] = False


class Gae(EstimatorChoice, frozen=True, tag="gae"):
    """Generalized advantage estimation, with a value head that is trained on the policy's last hidden states."""

    within_group: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    trainer_options: ClassVar[tuple[str, ...]] = ("critic_width", "critic_learning_rate", "critic_value_clip")

    discount: Fraction = 1.0
    """Discount factor per token."""
    gae_lambda: Fraction = 0.95
    """Lambda: 0 uses one step, 1 the whole episode."""
    whiten: bool = True
    """Normalize to mean 0 and variance 1 over the batch's tokens."""
    critic_width: PositiveInt = 128
    """Hidden units of the value head."""
    critic_learning_rate: NonNegativeFloat = 1e-3
    """Learning rate of the value head's AdamW."""
    critic_value_clip: PositiveFloat = float("inf")
    """Distance from its old value at which a value is clipped in the loss."""


class Remax(EstimatorChoice, frozen=True, tag="remax"):
    """ReMax: reward minus that of a greedy completion of the same prompt."""

    within_group: ClassVar[bool] = False
    per_token: ClassVar[bool] = True


class Opo(EstimatorChoice, frozen=True, tag="opo"):
    """OPO: reward minus the length-weighted mean of the group."""


class Gpg(EstimatorChoice, frozen=True, tag="gpg"):
    """GPG: reward minus the mean of the group, scaled up by the fraction of the batch whose reward is not 0."""

    within_group: ClassVar[bool] = False

    f_norm: PositiveFloat = 1.0
    """Divisor of the difference."""


class GrpoPassk(EstimatorChoice, frozen=True, tag="grpo_passk"):
    """Only the best completion of a group has an advantage: its lead over the second best."""

    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class Passk(EstimatorChoice, frozen=True, tag="passk"):
    """Analytic advantage of pass@k; `algorithm.success_threshold` decides what is correct."""

    reads: ClassVar[str] = "correct"

    k: PositiveInt = 4
    """Number k of attempts; one of them must be correct. At most `rollout.group_size`."""


class Gdpo(EstimatorChoice, frozen=True, tag="gdpo"):
    """GDPO: each reward part is normalized on its own, then weighted, summed and whitened."""

    within_group: ClassVar[bool] = False
    reads: ClassVar[str] = "parts"

    epsilon: PositiveFloat = 1e-6
    """Added to each standard deviation."""


class OptimalTokenBaseline(EstimatorChoice, frozen=True, tag="optimal_token_baseline"):
    """A baseline for each token position, weighted by the size of the gradient."""

    per_token: ClassVar[bool] = True

    zero_tail: bool = True
    """No baseline at positions that only one completion reaches."""
    epsilon: PositiveFloat = 1e-8
    """Added to the sum of weights."""


class TirOptimalTokenBaseline(EstimatorChoice, frozen=True, tag="tir_optimal_token_baseline"):
    """Optimal token baseline that counts only trainable tokens (for tool turns)."""

    per_token: ClassVar[bool] = True

    zero_tail: bool = True
    """No baseline at positions that only one completion reaches."""
    epsilon: PositiveFloat = 1e-8
    """Added to the sum of weights."""


class MaxRl(EstimatorChoice, frozen=True, tag="max_rl"):
    """MaxRL: reward minus the mean of the group, divided by that mean. Hard prompts weigh more; rewards are >= 0."""

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
