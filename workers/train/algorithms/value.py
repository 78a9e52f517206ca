"""The loss of a critic: how far its values are from the returns."""

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
        values_RT: V, of the critic that is trained, with gradient; its dtype is that of all arithmetic by token.
        old_values_RT: V_old, of the critic when the batch was formed.
        returns_RT: G, what the values are to come near to.
        mask_RT: bool, tokens that bear loss; elsewhere the three may hold anything.
        factors_R: float64, from `aggregation.factors`; a row without a loss token may hold anything.
        clip: how far a value may move from its old one before its loss can only grow; infinite for no bound.

    Returns:
        The loss, float64. Sums over loss tokens: `value/mean`, `value/error` (squared, before the clip),
        `value/clip_fraction`. No maxima.
    """
    values = torch.where(mask_RT, values_RT, 0.0)
    old = torch.where(mask_RT, old_values_RT.detach(), 0.0).to(values.dtype)
    returns = torch.where(mask_RT, returns_RT.detach(), 0.0).to(values.dtype)
    plain = (values - returns).square()
    bounded = (values.clamp(old - clip, old + clip) - returns).square()
    marks = {"value/mean": values, "value/error": plain, "value/clip_fraction": bounded > plain}
    return LossOutput(
        loss=weighted_sum(torch.maximum(plain, bounded) / 2, mask_RT, factors_R),
        sums={key: mark.detach().sum(dtype=torch.float64) for key, mark in marks.items()},
        maxima={},
    )
