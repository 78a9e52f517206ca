"""`[loss]`: policy losses and their options.

There is one class for each name in `workers.train.algorithms.losses.LOSSES`. Its fields are the keyword-only parameters
of the registered function (a test compares them); their defaults are defined here.
"""

from typing import ClassVar, Literal

from workers.settings.section import (
    FiniteFloat,
    Fraction,
    LossOptions,
    NonNegativeFloat,
    NonNegativeLimit,
    PositiveFloat,
    PositiveLimit,
)


class Clipped(LossOptions, frozen=True, tag="clipped"):
    """PPO: clipped ratio."""

    clip_low: Fraction = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeLimit = 0.2
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: NonNegativeLimit = 0.0
    """Dual-clip bound: with a negative advantage the loss is at most this many times the advantage; above 1, or 0 for
    none."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or its geometric mean over the completion."""


class Dapo(LossOptions, frozen=True, tag="dapo"):
    """DAPO: PPO with a higher upper clip (clip-higher)."""

    clip_low: Fraction = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeLimit = 0.28
    """The ratio is clipped at 1 + clip_high."""


class Gspo(LossOptions, frozen=True, tag="gspo"):
    """GSPO: one ratio per completion, the geometric mean of its tokens' ratios."""

    aggregation: ClassVar[str] = "seq-mean-token-mean"

    clip_low: Fraction = 3e-4
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeLimit = 4e-4
    """The ratio is clipped at 1 + clip_high."""


class Cispo(LossOptions, frozen=True, tag="cispo"):
    """CISPO: the ratio is a clipped, detached weight; every token keeps its gradient."""

    clip_low: Fraction = 0.2
    """The weight is at least 1 - clip_low."""
    clip_high: NonNegativeLimit = 0.28
    """The weight is at most 1 + clip_high."""


class Sapo(LossOptions, frozen=True, tag="sapo"):
    """SAPO: a soft gate instead of clipping."""

    aggregation: ClassVar[str] = "seq-mean-token-mean"

    tau_positive: PositiveFloat = 1.0
    """Temperature of the gate for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """Temperature of the gate for negative advantages."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or its geometric mean over the completion."""


class GeoMean(LossOptions, frozen=True, tag="geo_mean"):
    """GMPO: geometric mean of the clipped token ratios."""

    aggregation: ClassVar[str] = "seq-mean-token-mean"

    clip_low: PositiveLimit = 0.4
    """A log-ratio is clipped at -clip_low."""
    clip_high: PositiveLimit = 0.4
    """A log-ratio is clipped at clip_high."""


class GpgLoss(LossOptions, frozen=True, tag="gpg"):
    """GPG: log-probability times advantage, without a ratio."""

    on_policy: ClassVar[bool] = True


class ClipCov(LossOptions, frozen=True, tag="clip_cov"):
    """Clip-Cov: PPO without gradient on some tokens with a high covariance of log-prob and advantage."""

    clip_low: Fraction = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeLimit = 0.2
    """The ratio is clipped at 1 + clip_high."""
    clip_cov_ratio: Fraction = 2e-4
    """Fraction of the batch's tokens without gradient; at least one token."""
    clip_cov_low: FiniteFloat = 1.0
    """Only tokens with a higher covariance are candidates."""
    clip_cov_high: FiniteFloat = 5.0
    """Only tokens with a lower covariance are candidates."""


class KlCov(LossOptions, frozen=True, tag="kl_cov"):
    """KL-Cov: the plain ratio, with a KL penalty on the tokens with the largest covariance."""

    kl_cov_ratio: Fraction = 2e-4
    """Fraction of the batch's tokens with a penalty; at least one token."""
    kl_cov_coefficient: NonNegativeFloat = 1.0
    """Coefficient of the penalty."""


class DppoTv(LossOptions, frozen=True, tag="dppo_tv"):
    """DPPO: no gradient on tokens whose probability moved too far, by total variation."""

    clip_low: Fraction = 0.15
    """Largest decrease of the probability."""
    clip_high: Fraction = 0.15
    """Largest increase of the probability."""
    ratio_cap: PositiveLimit = 20.0
    """Upper bound of the ratio."""


class DppoKl(LossOptions, frozen=True, tag="dppo_kl"):
    """DPPO with the KL divergence of binary distributions as the measure."""

    clip_low: NonNegativeLimit = 0.05
    """Bound where the probability decreases."""
    clip_high: NonNegativeLimit = 0.05
    """Bound where the probability increases."""
    ratio_cap: PositiveLimit = 20.0
    """Upper bound of the ratio."""


class Dro(LossOptions, frozen=True, tag="dro"):
    """DRO: a squared penalty on the log-ratio."""

    dro_beta: PositiveFloat = 0.1
    """Coefficient of the penalty."""


class Reinforce(LossOptions, frozen=True, tag="reinforce"):
    """REINFORCE: log-probability times advantage times the importance weight of `[correction]`."""

    on_policy: ClassVar[bool] = True


Loss = Clipped | Dapo | Gspo | Cispo | Sapo | GeoMean | GpgLoss | ClipCov | KlCov | DppoTv | DppoKl | Dro | Reinforce
"""Any loss."""
