"""Logits from hidden states and the output layer, block by block: a range of tokens by a range of the vocabulary."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

BLOCK: Final = 2**24
"""Number of logits in a block: 64 MiB in float32. Two or three such tensors exist at a time."""
BLOCK_TOKENS: Final = 4096
"""Maximum number of tokens in a block, so that its vocabulary range is long enough for an efficient product."""


class LogitTransform(NamedTuple):
    """How a product of hidden state and weight becomes a logit: ``cap(product * scale) / temperature``."""

    scale: float = 1.0
    softcap: float = 0.0
    """c in ``c * tanh(z / c)``; 0 for no cap."""
    temperature: float = 1.0


class LogitBlock(NamedTuple):
    """Token range and vocabulary range of one block."""

    tokens: slice
    vocab: slice
    weight_vH: Tensor
    """In the dtype of products."""


class LogitConfig(NamedTuple):
    """How logits are computed."""

    transform: LogitTransform
    dtype: torch.dtype
    """Of the inputs of products."""
    block: int
    """Number of logits that exist at a time."""


class LogitInputs(NamedTuple):
    """Inputs of the logits of N tokens."""

    hidden_NH: Tensor
    """In the dtype of products."""
    weight_VH: Tensor
    bias_V: Tensor | None
    targets_N: Tensor
    config: LogitConfig

    def blocks(self) -> Iterator[LogitBlock]:
        """Yield all blocks; each vocabulary range of the weight is cast once."""
        count, vocab_size = len(self.hidden_NH), len(self.weight_VH)
        height = max(min(count, BLOCK_TOKENS, self.config.block), 1)
        width = max(self.config.block // height, 1)
        for start in range(0, vocab_size, width):
            vocab = slice(start, min(start + width, vocab_size))
            weight_vH = self.weight_VH[vocab].to(self.config.dtype)
            for token in range(0, count, height):
                yield LogitBlock(slice(token, token + height), vocab, weight_vH)

    def logits(self, block: LogitBlock) -> Tensor:
        """Return the block's logits after scale and cap, before the temperature."""
        transform = self.config.transform
        logits_nv = matmul_float32(self.hidden_NH[block.tokens], block.weight_vH.T)
        if self.bias_V is not None:
            logits_nv += self.bias_V[block.vocab].to(logits_nv.dtype)
        if transform.scale != 1.0:
            logits_nv *= transform.scale
        if transform.softcap:
            logits_nv.div_(transform.softcap).tanh_().mul_(transform.softcap)
        return logits_nv

    def apply_temperature(self, logits_nv: Tensor) -> Tensor:
        """Divide by the temperature, in place."""
        temperature = self.config.transform.temperature
        return logits_nv if temperature == 1.0 else logits_nv.div_(temperature)

    def targets(self, block: LogitBlock) -> tuple[Tensor, Tensor]:
        """Return whether each token's target is in the block (n, 1), and its column there (n, 1)."""
        columns_n1 = (self.targets_N[block.tokens] - block.vocab.start).unsqueeze(1)
        width = block.vocab.stop - block.vocab.start
        return (columns_n1 >= 0) & (columns_n1 < width), columns_n1.clamp(0, width - 1)


def matmul_float32(a_nk: Tensor, b_km: Tensor) -> Tensor:
    """Multiply matrices with sums in float32 or wider."""
    if a_nk.dtype not in {torch.bfloat16, torch.float16}:
        return a_nk @ b_km
    if a_nk.is_cuda:
        return torch.mm(a_nk, b_km, out_dtype=torch.float32)
    return a_nk.float() @ b_km.float()
