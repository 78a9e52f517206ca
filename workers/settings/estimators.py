"""`[estimator]`: how rewards become advantages, and the options that each estimator has.

One class to a name of `workers.train.algorithms.advantages.ESTIMATORS`, with the keyword-only parameters of the
function as its fields: a test holds the two together. Defaults stand here alone.
"""

from typing import ClassVar

from workers.settings.section import EstimatorChoice, Fraction, PositiveFloat, PositiveInt


class Grpo(EstimatorChoice, frozen=True, tag="grpo"):
    """Against the mean of the group."""

    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    leave_one_out: bool = False
    """Against the mean of the others instead."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""


class DrGrpo(EstimatorChoice, frozen=True, tag="dr_grpo"):
    """The same without standard deviation; goes with aggregation `seq-mean-token-sum-norm`."""


class Rloo(EstimatorChoice, frozen=True, tag="rloo"):
    """Against the mean of the others."""


class ReinforcePlusPlus(EstimatorChoice, frozen=True, tag="reinforce_plus_plus"):
    """Discounted reward to go of each token, whitened over the batch."""

    within_group: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    discount: Fraction = 1.0
    """Of a token's reward by each trainable token before it."""
    whiten: bool = True
    """Mean 0 and variance 1 over the batch's tokens."""


class ReinforcePlusPlusBaseline(EstimatorChoice, frozen=True, tag="reinforce_plus_plus_baseline"):
    """Against the mean of the group, whitened over the batch's tokens."""

    within_group: ClassVar[bool] = False


class Gae(EstimatorChoice, frozen=True, tag="gae"):
    """Generalised advantage estimation, with a value head trained beside the policy (`[critic]`)."""

    within_group: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    discount: Fraction = 1.0
    """Of what comes later, by token."""
    gae_lambda: Fraction = 0.95
    """Between one step (0) and the whole episode (1)."""
    whiten: bool = True
    """Mean 0 and variance 1 over the batch's tokens."""


class Remax(EstimatorChoice, frozen=True, tag="remax"):
    """Against one more rollout of each prompt, at temperature 0."""

    within_group: ClassVar[bool] = False
    per_token: ClassVar[bool] = True


class Opo(EstimatorChoice, frozen=True, tag="opo"):
    """Against the mean of the group weighted by length."""


class Gpg(EstimatorChoice, frozen=True, tag="gpg"):
    """Against the mean of the group, scaled up by the fraction of the batch whose reward is not 0."""

    within_group: ClassVar[bool] = False

    f_norm: PositiveFloat = 1.0
    """What the difference is divided by."""


class GrpoPassk(EstimatorChoice, frozen=True, tag="grpo_passk"):
    """Only the best of a group learns: its lead over the second."""

    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class Passk(EstimatorChoice, frozen=True, tag="passk"):
    """Analytic advantage of pass@k: right or wrong, by `algorithm.correct_at`."""

    reads: ClassVar[str] = "correct"

    k: PositiveInt = 4
    """Tries of which one must be right; at most `rollout.group_size`."""


class Gdpo(EstimatorChoice, frozen=True, tag="gdpo"):
    """Every part of the reward normalised on its own, then weighted, added and whitened."""

    within_group: ClassVar[bool] = False
    reads: ClassVar[str] = "parts"

    epsilon: PositiveFloat = 1e-6
    """Added to each standard deviation."""


class OptimalTokenBaseline(EstimatorChoice, frozen=True, tag="optimal_token_baseline"):
    """A baseline to each token place, weighted by the gradient's size."""

    per_token: ClassVar[bool] = True

    zero_tail: bool = True
    """No baseline where one completion alone goes on."""
    epsilon: PositiveFloat = 1e-8
    """Added to the sum of weights."""


class TirOptimalTokenBaseline(EstimatorChoice, frozen=True, tag="tir_optimal_token_baseline"):
    """The same, counting trainable tokens alone (tool turns)."""

    per_token: ClassVar[bool] = True

    zero_tail: bool = True
    """No baseline where one completion alone goes on."""
    epsilon: PositiveFloat = 1e-8
    """Added to the sum of weights."""


class MaxRl(EstimatorChoice, frozen=True, tag="max_rl"):
    """Against the mean of the group, divided by that mean: hard prompts weigh more. For rewards of 0 and more."""

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
"""Any of them."""
