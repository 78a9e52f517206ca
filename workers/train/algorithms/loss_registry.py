"""The registry of policy losses: pure functions from log-probs of a batch's tokens to a loss for each token."""

from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from workers.train.algorithms.registry import Registry


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Declared properties of a loss."""

    aggregation: str = ""
    """The only aggregation that the loss is defined with; empty for any."""
    on_policy: bool = False
    """True if the loss has no ratio to the proximal policy, so it is correct only for the first update of a batch."""
    selector: str = ""
    """Name in `token_selection.SELECTORS` of the function that makes `selected_RT`, once per optimizer batch."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """Loss of each token before aggregation, and before importance weights unless the loss applies them itself."""

    loss_RT: Tensor
    """Outside the mask it is finite and ignored."""
    token_metrics: dict[str, Tensor] = field(default_factory=dict)
    """(R, T), bool or numbers; their mean over loss tokens is a metric of that name."""


LOSSES: Final[Registry[LossTraits]] = Registry(
    "loss",
    {
        "logprobs_RT": "log-probs of the policy in training, with gradient; 0 outside the mask",
        "proximal_RT": "log-probs that the ratio is taken against; 0 outside the mask",
        "advantages_RT": "advantages; 0 outside the mask",
        "weights_RT": "importance weights, 1 outside the mask; a loss that takes them applies them",
        "sequences": "Sequences over the loss tokens of each completion",
        "selected_RT": "bool, tokens chosen by the loss's selector; False outside the mask",
    },
)
"""Losses by the name in `[loss] name`. `workers.train.algorithms.losses` fills the registry; import it from there.

In formulas: r = exp(logprobs - proximal), A the advantage, lp the log-prob, sg stops the gradient.
"""
