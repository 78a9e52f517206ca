"""The critic: a value head on the policy's last hidden states, trained beside it."""

from typing import Any

import torch
from torch import Tensor, nn


class Critic(nn.Module):
    """What the rest of the episode is worth, from the hidden state before a token.

    Two layers on hidden states that bear no gradient: the policy is trained by its own loss alone, whatever the critic
    has still to learn. The last layer starts at 0, so that an untrained critic says 0 of everything.

    Args:
        hidden_size: of the policy.
        width: units of the layer between.
        seed: of the first layer's weights.
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
        """Values (N) of these hidden states, in the type of the critic's own weights."""
        inner_NW = self.inner(hidden_NH.to(self.inner.weight.dtype))
        values: Tensor = self.outer(torch.nn.functional.silu(inner_NW)).squeeze(-1)
        return values


def hidden_size(model: Any) -> int:
    """Size of the last hidden states of a Hugging Face model.

    Raises:
        ValueError: its output layer is no module of its own, so they cannot be had.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError("the model's output layer is no module of its own, so a value head has nothing to stand on")
    return int(head.weight.shape[1])
