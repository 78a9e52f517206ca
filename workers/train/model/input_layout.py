"""How rows go through a model: padded to one length, or packed one behind another."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class ModelInputs(NamedTuple):
    """Rows as a model is given them."""

    inputs: dict[str, Any]
    """Arguments of the model."""
    starts_M: Tensor
    """int64, where each row begins in the flattened sequences."""


def lay_out(tokens_MT: Tensor, lengths_M: Tensor, *, packed: bool) -> ModelInputs:
    """Lay out rows that are padded on the right.

    Example, rows [1 2 3] and [4 5]::

        padded    input_ids [[1 2 3] [4 5 0]]                                             starts 0 3
        packed    input_ids [[1 2 3 4 5]]  position_ids [[0 1 2 0 1]]  cu_seq_lens 0 3 5  starts 0 3

    Attention is causal, so padding on the right needs no mask: nothing that counts can see it. Packed rows are told
    apart by their positions, which begin anew, and by their bounds, whichever the model's attention reads.
    """
    rows, width = tokens_MT.shape
    if not packed:
        return ModelInputs({"input_ids": tokens_MT}, torch.arange(rows, device=tokens_MT.device) * width)
    positions_MT = torch.arange(width, device=tokens_MT.device).expand(rows, width)
    real_MT = positions_MT < lengths_M.unsqueeze(1)
    ends_M = lengths_M.cumsum(0)
    bounds = torch.nn.functional.pad(ends_M, (1, 0)).to(torch.int32)
    longest = int(lengths_M.max())
    inputs = {
        "input_ids": tokens_MT[real_MT].unsqueeze(0),
        "position_ids": positions_MT[real_MT].unsqueeze(0),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return ModelInputs(inputs, ends_M - lengths_M)
