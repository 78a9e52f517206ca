"""What a policy loss is: a pure function from the log-probs of a batch's tokens to a loss for each of them."""

from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from workers.train.algorithms.registry import Registry


@dataclass(frozen=True, slots=True)
class LossTraits:
    """What a loss declares of itself."""

    aggregation: str = ""
    """The only aggregation that its definition knows; empty: any."""
    on_policy: bool = False
    """It has no ratio to the proximal policy, so it is right for the first update of a batch alone."""
    selector: str = ""
    """Name in `token_selection.SELECTORS` of what makes its `selected_RT`, once for the whole optimizer batch."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """What a loss returns: before importance weights (unless it takes them itself) and before aggregation."""

    loss_RT: Tensor
    """Of every token; what stands outside the mask is finite, and is not looked at."""
    token_metrics: dict[str, Tensor] = field(default_factory=dict)
    """(R, T), bool or numbers, of which the mean over loss tokens is a metric of that name."""


LOSSES: Final[Registry[LossTraits]] = Registry(
    "loss",
    {
        "logprobs_RT": "log-probs of the policy that is trained, with gradient; 0 outside the mask",
        "proximal_RT": "log-probs that the ratio is taken against; 0 outside the mask",
        "advantages_RT": "advantages; 0 outside the mask",
        "weights_RT": "importance weights, 1 outside the mask; who asks for them applies them",
        "sequences": "Sequences over the loss tokens of each completion",
        "selected_RT": "bool, tokens chosen by the loss's selector; False outside the mask",
    },
)
"""By name, as `[loss] name` says it. `workers.train.algorithms.losses` fills it; import it from there.

In formulas: r = exp(logprobs - proximal), A the advantage, lp the log-prob, sg no gradient.
"""
