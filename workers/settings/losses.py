"""`[loss]`: the policy loss, and the options that each has.

One class to a name of `workers.train.algorithms.losses.LOSSES`, with the keyword-only parameters of the function as its
fields: a test holds the two together. Defaults stand here alone.
"""

from typing import ClassVar, Literal

from workers.settings.section import Fraction, LossChoice, NonNegativeFloat, PositiveFloat


class Clipped(LossChoice, frozen=True, tag="clipped"):
    """PPO's."""

    clip_low: Fraction = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: NonNegativeFloat = 0.0
    """Where the advantage is negative, the loss is at most this often the advantage; above 1, or 0: no such bound."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or the geometric mean over the completion."""


class Dapo(LossChoice, frozen=True, tag="dapo"):
    """PPO's with more room upwards."""

    clip_low: Fraction = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.28
    """The ratio is clipped at 1 + clip_high."""


class Gspo(LossChoice, frozen=True, tag="gspo"):
    """One ratio to a completion, the geometric mean of its tokens'."""

    aggregation: ClassVar[str] = "seq-mean-token-mean"

    clip_low: Fraction = 3e-4
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeFloat = 4e-4
    """The ratio is clipped at 1 + clip_high."""


class Cispo(LossChoice, frozen=True, tag="cispo"):
    """The ratio is clipped as a weight; every token keeps its gradient."""

    clip_low: Fraction = 0.2
    """The weight is at least 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.28
    """The weight is at most 1 + clip_high."""


class Sapo(LossChoice, frozen=True, tag="sapo"):
    """A soft gate instead of a clip."""

    aggregation: ClassVar[str] = "seq-mean-token-mean"

    tau_positive: PositiveFloat = 1.0
    """Steepness where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """Steepness where it is negative."""


class GeoMean(LossChoice, frozen=True, tag="geo_mean"):
    """Geometric mean of the clipped token ratios (GMPO)."""

    aggregation: ClassVar[str] = "seq-mean-token-mean"

    clip_low: PositiveFloat = 0.4
    """A log-ratio is clipped at -clip_low."""
    clip_high: PositiveFloat = 0.4
    """A log-ratio is clipped at clip_high."""


class GpgLoss(LossChoice, frozen=True, tag="gpg"):
    """Log-probability times advantage; no ratio."""

    on_policy: ClassVar[bool] = True


class ClipCov(LossChoice, frozen=True, tag="clip_cov"):
    """PPO's, without gradient on a few tokens whose log-prob and advantage vary together."""

    clip_low: Fraction = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped at 1 + clip_high."""
    clip_cov_ratio: Fraction = 2e-4
    """Fraction of the batch's tokens that are taken out, at least one."""
    clip_cov_low: float = 1.0
    """Covariance above which a token may be taken out."""
    clip_cov_high: float = 5.0
    """And below which."""


class KlCov(LossChoice, frozen=True, tag="kl_cov"):
    """The plain ratio, with a penalty on the tokens of the largest covariance."""

    kl_cov_ratio: Fraction = 2e-4
    """Fraction of the batch's tokens that are penalised, at least one."""
    kl_cov_coefficient: NonNegativeFloat = 1.0
    """Of the penalty."""


class DppoTv(LossChoice, frozen=True, tag="dppo_tv"):
    """Tokens whose probability moved too far, by total variation, bear no gradient."""

    clip_low: Fraction = 0.15
    """How far it may fall."""
    clip_high: Fraction = 0.15
    """How far it may rise."""
    ratio_cap: PositiveFloat = 20.0
    """The ratio is at most this."""


class DppoKl(LossChoice, frozen=True, tag="dppo_kl"):
    """The same by the divergence of the binary distributions."""

    clip_low: NonNegativeFloat = 0.05
    """Bound where the probability falls."""
    clip_high: NonNegativeFloat = 0.05
    """Bound where it rises."""
    ratio_cap: PositiveFloat = 20.0
    """The ratio is at most this."""


class Dro(LossChoice, frozen=True, tag="dro"):
    """Direct reward optimisation: a squared penalty on the log-ratio."""

    dro_beta: PositiveFloat = 0.1
    """Of the penalty."""


class Reinforce(LossChoice, frozen=True, tag="reinforce"):
    """Log-probability times advantage, times the importance weight of `[correction]`."""

    on_policy: ClassVar[bool] = True


Loss = Clipped | Dapo | Gspo | Cispo | Sapo | GeoMean | GpgLoss | ClipCov | KlCov | DppoTv | DppoKl | Dro | Reinforce
"""Any of them."""
