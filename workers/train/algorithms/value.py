"""Value loss of a critic: the squared error of its values."""

import torch
from torch import Tensor

from workers.train.algorithms.losses import LossOutput, weighted_sum


def value_loss(
    values_RT: Tensor,
    old_values_RT: Tensor,
    returns_RT: Tensor,
    mask_RT: Tensor,
    factors_R: Tensor,
    *,
    clip: float,
) -> LossOutput:
    """PPO's clipped value loss, 0.5 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2).

    Source: Schulman et al. 2017 as in OpenAI baselines (ppo2); verl core_algos.compute_value_loss.

    Args:
        values_RT: V, from the critic in training, with gradient; its dtype is used for all arithmetic per token.
        old_values_RT: V_old, from the critic when the batch was prepared.
        returns_RT: G, the targets.
        mask_RT: bool, tokens that bear loss; values of other tokens are ignored.
        factors_R: float64, from `aggregation.row_factors`; factors of rows without a loss token are ignored.
        clip: a value gains nothing by moving further than this from its old value; infinity: no clipping.

    Returns:
        The loss, float64. Sums over loss tokens: `value/mean`, `value/error` (squared error before clipping),
        `value/clip_fraction`. No maxima.
    """
    values = torch.where(mask_RT, values_RT, 0.0)
    old = torch.where(mask_RT, old_values_RT.detach(), 0.0).to(values.dtype)
    returns = torch.where(mask_RT, returns_RT.detach(), 0.0).to(values.dtype)
    plain = (values - returns).square()
    clipped = (values.clamp(old - clip, old + clip) - returns).square()
    token_metrics = {"value/mean": values, "value/error": plain, "value/clip_fraction": clipped > plain}
    return LossOutput(
        loss=weighted_sum(torch.maximum(plain, clipped) / 2, mask_RT, factors_R),
        sums={key: value.detach().sum(dtype=torch.float64) for key, value in token_metrics.items()},
        maxima={},
    )
