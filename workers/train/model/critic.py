"""The critic: a value head on the policy's last hidden states."""

from typing import Any

import torch
from torch import Tensor, nn


class Critic(nn.Module):
    """Predicts the reward to go from the hidden state before a token.

    Two layers on detached hidden states, so the value loss does not train the policy. The last layer starts at 0, so an
    untrained critic returns 0.

    Args:
        hidden_size: of the policy's hidden states.
        width: size of the inner layer.
        seed: of the inner layer's weights.
    """

    def __init__(self, hidden_size: int, width: int, seed: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, width)
        self.outer = nn.Linear(width, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.inner.weight.copy_(torch.randn(width, hidden_size, generator=generator) / hidden_size**0.5)
            self.inner.bias.zero_()
            self.outer.weight.zero_()
            self.outer.bias.zero_()

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """Return the values (N) of hidden states, in the dtype of the critic's weights."""
        inner_NW = self.inner(hidden_NH.to(self.inner.weight.dtype))
        values: Tensor = self.outer(torch.nn.functional.silu(inner_NW)).squeeze(-1)
        return values


def hidden_size(model: Any) -> int:
    """Return the size of the last hidden states of a Hugging Face model.

    Raises:
        ValueError: the output layer is not a separate module, so hidden states cannot be captured.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError("the model's output layer is not a separate module, so a value head cannot replace it")
    return int(head.weight.shape[1])
