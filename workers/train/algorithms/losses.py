"""Policy losses over the sampled tokens of a batch, or of a part of it.

Ratios compare the policy in training with the proximal policy (the trainer's policy when the batch was prepared, unless
the settings say otherwise). The policy that sampled enters only through importance weights. A loss is a sum over
tokens, each times its factor in the *whole* optimizer batch (`aggregation`), so every partition of the completions into
micro-batches adds up to the same loss and gradient.

Values outside the mask are replaced before any arithmetic: a `where` afterwards would leave the loss finite and make
the gradient NaN.

The value loss of a critic is the squared error of its values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workers.train.algorithms import (  # noqa: F401 - importing a module registers its losses
    clipped_losses,
    gradient_losses,
    sequence_losses,
)
from workers.train.algorithms.registry import LOSSES, LossTraits, TokenLoss
from workers.train.algorithms.sequences import Sequences, clamp_log_ratio

__all__ = ["LOSSES", "LossInputs", "LossOutput", "LossTraits", "TokenLoss", "policy_loss", "token_loss", "weighted_sum"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossInputs:
    """Inputs of a policy loss for some rows; all rows of a completion must be present.

    Outside the mask every tensor may hold anything.
    """

    logprobs_RT: Tensor
    """Log-probs of the policy in training, with gradient; their dtype is used for all arithmetic per token."""
    proximal_RT: Tensor
    """Log-probs of the policy that ratios are taken against."""
    advantages_RT: Tensor
    """One per token."""
    sequences: Sequences
    """Completions over the tokens that bear loss."""
    weights_RT: Tensor | None = None
    """Importance weights without gradient; 1 everywhere if None."""
    selected_RT: Tensor | None = None
    """bool, tokens chosen by the loss's selector; none if None."""

    @property
    def mask_RT(self) -> Tensor:
        """bool, tokens that bear loss."""
        return self.sequences.mask_RT


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """A part's share of the loss, and sums for metrics."""

    loss: Tensor
    """Scalar; the shares of all parts add up to the batch's loss."""
    sums: dict[str, Tensor]
    """Detached scalars that add up over parts; divided by the batch's loss tokens they are means over these."""
    maxima: dict[str, Tensor]
    """Detached scalars whose maximum over parts counts; 0 without a loss token."""


def policy_loss(name: str, inputs: LossInputs, factors_R: Tensor, options: Mapping[str, Any]) -> LossOutput:
    """Compute these rows' share of the loss.

    Args:
        name: of the loss, in `LOSSES`.
        inputs: of these rows.
        factors_R: float64, from `aggregation.row_factors`; a row without a loss token may hold anything.
        options: by name; options of other losses are ignored.

    Returns:
        The loss, float64. Sums over loss tokens: the loss's own metrics; `ratio/mean`, policy in training by proximal
        policy; `kl/k1` and `kl/k3`, of KL(proximal, in training) from the log-ratio. Maxima: `ratio/max`.

    Raises:
        KeyError: unknown loss, or one of its options is missing.
    """
    inputs = _fill(inputs)
    mask_RT = inputs.mask_RT
    token = _token_loss(name, inputs, options)
    token_metrics, ratio_RT = _ratio_metrics(inputs)
    token_metrics |= token.token_metrics
    return LossOutput(
        loss=weighted_sum(token.loss_RT, mask_RT, factors_R),
        sums={
            key: torch.where(mask_RT, values_RT.detach(), 0).sum(dtype=torch.float64)
            for key, values_RT in token_metrics.items()
        },
        maxima={"ratio/max": _masked_max(ratio_RT, mask_RT)},
    )


def token_loss(name: str, inputs: LossInputs, options: Mapping[str, Any]) -> TokenLoss:
    """Compute the loss of every token before aggregation, importance weights applied, and the loss's metrics.

    Args:
        name: of the loss, in `LOSSES`.
        inputs: of these rows.
        options: by name; options of other losses are ignored.

    Returns:
        Losses and metrics; outside the mask they are finite and meaningless.

    Raises:
        KeyError: unknown loss, or one of its options is missing.
    """
    return _token_loss(name, _fill(inputs), options)


def weighted_sum(values_RT: Tensor, mask_RT: Tensor, factors_R: Tensor) -> Tensor:
    """Sum factor times value over loss tokens, in float64.

    Args:
        values_RT: finite everywhere, or without gradient where they are not.
        mask_RT: bool, tokens that bear loss.
        factors_R: float64, from `aggregation.row_factors`; a row without a loss token may hold anything.
    """
    factors_RT = torch.where(mask_RT, factors_R.unsqueeze(1), 0.0)
    return (torch.where(mask_RT, values_RT, 0.0) * factors_RT).sum()


def _fill(inputs: LossInputs) -> LossInputs:
    """Replace everything outside the mask; only the log-probs in training keep their gradient."""
    mask_RT, like = inputs.mask_RT, inputs.logprobs_RT
    return replace(
        inputs,
        logprobs_RT=torch.where(mask_RT, inputs.logprobs_RT, 0.0),
        proximal_RT=_masked_like(inputs.proximal_RT, mask_RT, 0.0, like=like),
        advantages_RT=_masked_like(inputs.advantages_RT, mask_RT, 0.0, like=like),
        weights_RT=_masked_like(inputs.weights_RT, mask_RT, 1.0, like=like),
        selected_RT=torch.zeros_like(mask_RT) if inputs.selected_RT is None else inputs.selected_RT & mask_RT,
    )


def _token_loss(name: str, filled: LossInputs, options: Mapping[str, Any]) -> TokenLoss:
    loss = LOSSES[name]
    available: dict[str, Any] = {
        "logprobs_RT": filled.logprobs_RT,
        "proximal_RT": filled.proximal_RT,
        "advantages_RT": filled.advantages_RT,
        "weights_RT": filled.weights_RT,
        "sequences": filled.sequences,
        "selected_RT": filled.selected_RT,
    }
    token: TokenLoss = loss(available, options)
    if "weights_RT" in loss.input_names:
        return token
    return TokenLoss(token.loss_RT * available["weights_RT"], token.token_metrics)


@torch.no_grad()
def _ratio_metrics(filled: LossInputs) -> tuple[dict[str, Tensor], Tensor]:
    """Return the metrics per token that every loss has, and the ratio."""
    log_ratio_RT = clamp_log_ratio(filled.logprobs_RT.detach() - filled.proximal_RT)
    ratio_RT = log_ratio_RT.exp()
    return {"ratio/mean": ratio_RT, "kl/k1": -log_ratio_RT, "kl/k3": log_ratio_RT.expm1() - log_ratio_RT}, ratio_RT


def _masked_like(values_RT: Tensor | None, mask_RT: Tensor, fill: float, *, like: Tensor) -> Tensor:
    """Return values without gradient in the dtype of `like`, with `fill` outside the mask, or everywhere if None."""
    if values_RT is None:
        return like.new_full(like.shape, fill)
    return torch.where(mask_RT, values_RT.detach(), fill).to(like.dtype)


def _masked_max(values_RT: Tensor, mask_RT: Tensor) -> Tensor:
    masked_RT = torch.where(mask_RT, values_RT, 0.0)
    return masked_RT.max() if masked_RT.numel() else values_RT.new_zeros(())


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
