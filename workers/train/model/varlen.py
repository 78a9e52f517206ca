"""Attention over rows that lie one behind another, each seeing itself alone.

Registered with transformers under the name `varlen`. On a GPU in half precision it is `torch.nn.attention.varlen`,
the flash attention that comes with torch; elsewhere the rows are attended to one by one, which is as exact and makes no
mask of all tokens by all tokens. Rows that are not packed (a batch of padded ones) go the same way.
"""

from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

NAME: Final = "varlen"
"""As `train.attention` and transformers know it."""


def register() -> None:
    """Make the name known to transformers; may be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # which makes none: bounds are told apart


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention, as transformers calls it.

    Args:
        module: the layer.
        query: [rows, heads, tokens, size]; one row of them where they are packed.
        key: as the query, maybe with fewer heads.
        value: as the key.
        attention_mask: None, since neither packed nor right-padded rows need one.
        scaling: of the scores.
        sliding_window: a token sees so many, itself included.
        cu_seq_lens_q: int32, where packed rows begin, and the end; unless given, rows are as they lie.
        others: `max_length_q`, the longest packed row, and what other implementations may need.

    Returns:
        [rows, tokens, heads, size], and no weights.

    Raises:
        ValueError: the model asks for what this attention does not have.
    """
    causal = others.get("is_causal", getattr(module, "is_causal", True))
    asked = [name for name in ("dropout", "softcap", "s_aux", "position_bias") if not _is_unset(others.get(name))]
    asked += ["attention_mask"] * (attention_mask is not None) + ["is_causal = False"] * (causal is False)
    if asked:
        raise ValueError(f"attention 'varlen' has no {', '.join(asked)}")
    rows, heads, length, _ = query.shape
    longest = int(others.get("max_length_q") or length)
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)
        longest = length
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    fewer = key.shape[1] != heads
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype in {torch.bfloat16, torch.float16}:
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        found = varlen_attn(
            query,
            key,
            value,
            cu_seq_lens_q,
            cu_seq_lens_q,
            longest,
            longest,
            scale=scaling,
            window_size=window,
            enable_gqa=fewer,
        )
        out = found if isinstance(found, Tensor) else found[0]
    else:
        places = [slice(*pair) for pair in pairwise(cu_seq_lens_q.tolist())]
        out = torch.cat([_attend_row(query[p], key[p], value[p], scaling, sliding_window) for p in places])
    return out.view(rows, length, heads, -1), None


def _attend_row(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """One row, [tokens, heads, size]."""
    seen = None
    if window is not None and window < len(query):
        ones = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device)
        seen = ones.tril() & ones.triu(1 - window)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    fewer = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=fewer
    )
    return out.squeeze(0).transpose(0, 1)


def _is_unset(asked: Any) -> bool:
    return asked is None or (isinstance(asked, float | int) and not asked)
