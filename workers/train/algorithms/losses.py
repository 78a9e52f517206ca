"""Policy losses over the sampled tokens of a batch, or of a part of it.

Two policies meet here: the one that ratios are taken against (proximal: the trainer's when the batch was formed, unless
the settings say otherwise), and the one that is trained; the third, which sampled, is in the importance weights. A
loss is a sum over its part's tokens, each times its factor in the *whole* optimizer batch (`aggregation`), so that any
partition of the completions into micro-batches adds up to the same loss and gradient.

What stands outside the mask is replaced before any arithmetic: a `where` after it would leave the loss finite and make
the gradient NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.train.algorithms import (  # noqa: F401 - each of them registers its losses
    clipped_losses,
    gradient_losses,
    penalised_losses,
    sequence_losses,
)
from workers.train.algorithms.loss_registry import LOSSES, LossTraits, TokenLoss
from workers.train.algorithms.ratios import clamp_log_ratio
from workers.train.algorithms.sequences import Sequences

__all__ = ["LOSSES", "LossOutput", "LossTraits", "TokenLoss", "policy_loss", "token_loss", "weighted_sum"]


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """A part's share of the loss, and sums from which metrics are made."""

    loss: Tensor
    """Scalar; the shares of all parts add up to the batch's loss."""
    sums: dict[str, Tensor]
    """Detached scalars that add up over parts; divided by the batch's loss tokens they are means over these."""
    maxima: dict[str, Tensor]
    """Detached scalars of which the largest over parts counts; 0 where there is no loss token."""


def policy_loss(  # noqa: PLR0913 - three policies, the advantages, and how each token counts
    name: str,
    logprobs_RT: Tensor,
    *,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    mask_RT: Tensor,
    completion_ids_R: Tensor,
    factors_R: Tensor,
    weights_RT: Tensor | None = None,
    selected_RT: Tensor | None = None,
    options: Mapping[str, Any],
) -> LossOutput:
    """The share of the loss that these rows bear. All rows of a completion must be here.

    Args:
        name: of the loss.
        logprobs_RT: of the policy that is trained, with gradient; its dtype is that of all arithmetic by token.
        proximal_RT: of the policy that ratios are taken against.
        advantages_RT: one for each token.
        mask_RT: bool, tokens that bear loss. In all other places, every input may hold anything.
        completion_ids_R: integers, the completion that each row belongs to.
        factors_R: float64, from `aggregation.factors`; a row without a loss token may hold anything.
        weights_RT: importance weights, without gradient; 1 everywhere unless given.
        selected_RT: bool, tokens chosen by the loss's selector; none unless given.
        options: by name; those of other functions are ignored.

    Returns:
        The loss, float64. Sums, over loss tokens: the loss's own marks; `ratio/mean`, trained by proximal policy;
        `kl/k1` and `kl/k3`, of KL(proximal, trained) from its log. Maxima: `ratio/max`.

    Raises:
        KeyError: there is no such loss, or one of its options is missing.
    """
    token = token_loss(
        name,
        logprobs_RT,
        proximal_RT=proximal_RT,
        advantages_RT=advantages_RT,
        mask_RT=mask_RT,
        completion_ids_R=completion_ids_R,
        weights_RT=weights_RT,
        selected_RT=selected_RT,
        options=options,
    )
    marks, maxima = _ratio_metrics(logprobs_RT.detach(), proximal_RT, mask_RT)
    marks |= token.token_metrics
    sums = {key: torch.where(mask_RT, mark.detach(), 0).sum(dtype=torch.float64) for key, mark in marks.items()}
    return LossOutput(loss=weighted_sum(token.loss_RT, mask_RT, factors_R), sums=sums, maxima=maxima)


def token_loss(
    name: str,
    logprobs_RT: Tensor,
    *,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    mask_RT: Tensor,
    completion_ids_R: Tensor,
    weights_RT: Tensor | None = None,
    selected_RT: Tensor | None = None,
    options: Mapping[str, Any],
) -> TokenLoss:
    """The loss of every token before aggregation, importance weights applied, and the loss's marks.

    The arguments are those of `policy_loss`.

    Returns:
        The losses and marks; what stands outside the mask is finite, and means nothing.

    Raises:
        KeyError: there is no such loss, or one of its options is missing.
    """
    loss = LOSSES[name]
    weights_RT = _masked_like(weights_RT, mask_RT, 1.0, like=logprobs_RT)
    inputs = {
        "logprobs_RT": torch.where(mask_RT, logprobs_RT, 0.0),
        "proximal_RT": _masked_like(proximal_RT, mask_RT, 0.0, like=logprobs_RT),
        "advantages_RT": _masked_like(advantages_RT, mask_RT, 0.0, like=logprobs_RT),
        "weights_RT": weights_RT,
        "sequences": Sequences(mask_RT, completion_ids_R),
        "selected_RT": torch.zeros_like(mask_RT) if selected_RT is None else selected_RT & mask_RT,
    }
    found: TokenLoss = loss(inputs, options)
    weighted_RT = found.loss_RT if "weights_RT" in loss.input_names else found.loss_RT * weights_RT
    return TokenLoss(weighted_RT, found.token_metrics)


def weighted_sum(values_RT: Tensor, mask_RT: Tensor, factors_R: Tensor) -> Tensor:
    """Sum over loss tokens of factor times value, in float64.

    Args:
        values_RT: finite everywhere, or without gradient where they are not.
        mask_RT: bool, tokens that bear loss.
        factors_R: float64, from `aggregation.factors`; a row without a loss token may hold anything.
    """
    factors_RT = torch.where(mask_RT, factors_R.unsqueeze(1), 0.0)
    return (torch.where(mask_RT, values_RT, 0.0) * factors_RT).sum()


@torch.no_grad()
def _ratio_metrics(
    logprobs_RT: Tensor, proximal_RT: Tensor, mask_RT: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Marks and maxima that every loss has."""
    logprobs_RT = torch.where(mask_RT, logprobs_RT, 0.0)
    proximal_RT = _masked_like(proximal_RT, mask_RT, 0.0, like=logprobs_RT)
    moved_RT = clamp_log_ratio(logprobs_RT - proximal_RT)
    ratio_RT = moved_RT.exp()
    marks = {"ratio/mean": ratio_RT, "kl/k1": -moved_RT, "kl/k3": moved_RT.expm1() - moved_RT}
    return marks, {"ratio/max": _masked_max(ratio_RT, mask_RT)}


def _masked_like(values_RT: Tensor | None, mask_RT: Tensor, fill: float, *, like: Tensor) -> Tensor:
    """Values without gradient in the dtype of `like`, with `fill` outside the mask, or everywhere."""
    if values_RT is None:
        return like.new_full(like.shape, fill)
    return torch.where(mask_RT, values_RT.detach(), fill).to(like.dtype)


def _masked_max(values_RT: Tensor, mask_RT: Tensor) -> Tensor:
    largest = torch.where(mask_RT, values_RT, 0.0)
    return largest.max() if largest.numel() else values_RT.new_zeros(())
