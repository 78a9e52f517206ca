"""Attention over packed rows, each of which attends only to itself.

Registered with transformers as `varlen`. On a GPU in half precision it is `torch.nn.attention.varlen`, torch's own
flash attention; elsewhere rows are processed one by one, which is as exact and needs no mask of all tokens by all
tokens. Padded rows are processed the same way.
"""

from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

NAME: Final = "varlen"
"""Name in `train.attention` and in transformers."""


def register() -> None:
    """Register with transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(
        NAME, flash_attention_mask
    )  # it makes no mask, because row bounds are passed separately


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
    """Compute causal attention with the signature that transformers calls.

    Args:
        module: the layer.
        query: [rows, heads, tokens, size]; a single row if rows are packed.
        key: as the query, possibly with fewer heads.
        value: as the key.
        attention_mask: None, because neither packed nor right-padded rows need one.
        scaling: of the scores.
        sliding_window: number of tokens that a token attends to, including itself.
        cu_seq_lens_q: int32, starts of packed rows and the end of the last; None if rows are not packed.
        others: `max_length_q`, the longest packed row, and arguments of other attention implementations.

    Returns:
        [rows, tokens, heads, size], and no weights.

    Raises:
        ValueError: the model uses a feature that this attention lacks.
    """
    causal = others.get("is_causal", getattr(module, "is_causal", True))
    used = [name for name in ("dropout", "softcap", "s_aux", "position_bias") if not _is_unset(others.get(name))]
    used += ["attention_mask"] * (attention_mask is not None) + ["is_causal = False"] * (causal is False)
    if used:
        raise ValueError(f"attention 'varlen' has no {', '.join(used)}")
    rows, heads, length, _ = query.shape
    longest = int(others.get("max_length_q") or length)
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)
        longest = length
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype in {torch.bfloat16, torch.float16}:
        out = _attend_packed(query, key, value, cu_seq_lens_q, longest, scaling, sliding_window)
    else:
        spans = [slice(*pair) for pair in pairwise(cu_seq_lens_q.tolist())]
        out = torch.cat([_attend_row(query[s], key[s], value[s], scaling, sliding_window) for s in spans])
    return out.view(rows, length, heads, -1), None


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend over all rows, [tokens, heads, size], with torch's flash attention."""
    result = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return result if isinstance(result, Tensor) else result[0]


def _attend_row(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Attend over one row, [tokens, heads, size]."""
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
