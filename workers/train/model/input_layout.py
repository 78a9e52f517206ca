"""Model inputs from rows: padded to one length, or packed one after another."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class ModelInputs(NamedTuple):
    """Rows as a model takes them."""

    inputs: dict[str, Any]
    """Keyword arguments of the model."""
    starts_M: Tensor
    """int64, start of each row in the flattened rows."""


def lay_out(tokens_MT: Tensor, lengths_M: Tensor, *, packed: bool) -> ModelInputs:
    """Convert right-padded rows to model inputs.

    Example, rows [1 2 3] and [4 5]::

        padded    input_ids [[1 2 3] [4 5 0]]                                             starts 0 3
        packed    input_ids [[1 2 3 4 5]]  position_ids [[0 1 2 0 1]]  cu_seq_lens 0 3 5  starts 0 3

    Attention is causal, so right padding needs no mask. Packed rows are separated by positions that restart at 0 and by
    their bounds; the model's attention uses one of the two.
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
