"""Logits out of hidden states and the output layer, a block at a time: some tokens times some words."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

BLOCK: Final = 2**24
"""Logits of one block: 64 MiB in float32. Two or three such tensors live at a time."""
BLOCK_TOKENS: Final = 4096
"""Tokens of one block at most, so that its other side is long enough for an efficient product."""


class LogitTransform(NamedTuple):
    """What is done to the product of hidden states and weight: ``cap(product * scale) / temperature``."""

    scale: float = 1.0
    softcap: float = 0.0
    """c of ``c * tanh(z / c)``; 0: none."""
    temperature: float = 1.0


class LogitBlock(NamedTuple):
    """Tokens and words of one block."""

    tokens: slice
    vocab: slice
    weight_vH: Tensor
    """In the type that products are made of."""


class LogitConfig(NamedTuple):
    """How logits are made."""

    transform: LogitTransform
    dtype: torch.dtype
    """That products are made of."""
    block: int
    """Logits that exist at a time."""


class LogitInputs(NamedTuple):
    """What logits are made from, and how."""

    hidden_NH: Tensor
    """In the type that products are made of."""
    weight_VH: Tensor
    bias_V: Tensor | None
    targets_N: Tensor
    config: LogitConfig

    def blocks(self) -> Iterator[LogitBlock]:
        """All blocks; each stripe of the weight is cast once."""
        count, words = len(self.hidden_NH), len(self.weight_VH)
        height = max(min(count, BLOCK_TOKENS, self.config.block), 1)
        width = max(self.config.block // height, 1)
        for word in range(0, words, width):
            stripe = slice(word, min(word + width, words))
            weight_vH = self.weight_VH[stripe].to(self.config.dtype)
            for token in range(0, count, height):
                yield LogitBlock(slice(token, token + height), stripe, weight_vH)

    def logits(self, block: LogitBlock) -> Tensor:
        """After scale and cap, before the temperature."""
        finish = self.config.transform
        logits_nv = matmul_float32(self.hidden_NH[block.tokens], block.weight_vH.T)
        if self.bias_V is not None:
            logits_nv += self.bias_V[block.vocab].to(logits_nv.dtype)
        if finish.scale != 1.0:
            logits_nv *= finish.scale
        if finish.softcap:
            logits_nv.div_(finish.softcap).tanh_().mul_(finish.softcap)
        return logits_nv

    def apply_temperature(self, logits_nv: Tensor) -> Tensor:
        """After the temperature; in place."""
        temperature = self.config.transform.temperature
        return logits_nv if temperature == 1.0 else logits_nv.div_(temperature)

    def targets(self, block: LogitBlock) -> tuple[Tensor, Tensor]:
        """Whether each token's target is in the block (n, 1), and its column there (n, 1)."""
        columns_n1 = (self.targets_N[block.tokens] - block.vocab.start).unsqueeze(1)
        width = block.vocab.stop - block.vocab.start
        return (columns_n1 >= 0) & (columns_n1 < width), columns_n1.clamp(0, width - 1)


def matmul_float32(a_nk: Tensor, b_km: Tensor) -> Tensor:
    """A product whose sums are made and kept in float32 at least."""
    if a_nk.dtype not in {torch.bfloat16, torch.float16}:
        return a_nk @ b_km
    if a_nk.is_cuda:
        return torch.mm(a_nk, b_km, out_dtype=torch.float32)
    return a_nk.float() @ b_km.float()
