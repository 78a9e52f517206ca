"""What a pass without gradient sees of a batch, before it is decided what of it is trained."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardStatistics:
    """Of the tokens that may bear loss, under the trainer's weights when the batch was formed; 0 elsewhere."""

    old_logprobs_RT: Tensor
    """Log-probs."""
    sum_pi_squared_RT: Tensor
    """Sum of the squared probabilities of the distribution that each token was drawn from."""
    values_RT: Tensor
    """The critic's value of the state before each token; 0 without a critic."""
    end_values_R: Tensor
    """And of the state after the last token of each row."""
