"""A model together with the way it is read, as one module."""

from typing import Any

from torch import nn

from workers.train.logprobs import TokenLogprobs, token_logprobs


class Reader(nn.Module):
    """A causal language model that answers with log-probs of chosen tokens.

    One module, because a sharded model has its weights whole only within a forward pass, and log-probs are made from
    the output layer's weight as well as from what the model returns: around `forward`, all of it is there.

    Args:
        model: a Hugging Face causal language model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> TokenLogprobs:
        """`token_logprobs` of the model."""
        return token_logprobs(self.model, *args, **kwargs)
