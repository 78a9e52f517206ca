"""Attention over packed rows, and over a prefix tree of rows, registered with transformers.

`varlen`: rows one after another, each of which attends only to itself. On a GPU in half precision it is
`torch.nn.attention.varlen`, torch's own flash attention; elsewhere rows are processed one by one, which is as exact and
needs no mask of all tokens by all tokens. Padded rows are processed the same way.

`tree`: the places of a prefix tree. On a GPU it is `flex_attention` with a block mask made from the tree; elsewhere
each branch attends to the keys on its path, again without a mask of all places by all places.
"""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from workers.train.model.prefix_tree import PrefixTree

VARLEN: Final = "varlen"
"""Name in `train.attention` and in transformers."""
TREE: Final = "tree"
"""Name in transformers."""
CAUSAL: Final = "causal"
"""Name in transformers of its SDPA without a mask, for tensors without values: with those it always makes a mask, since
it cannot see that rows are not packed."""


def switch_attention(model: Any, name: str) -> str:
    """Switch the attention implementation; return why the model does not support it, or an empty string."""
    if model.config._attn_implementation == name:  # noqa: SLF001
        return ""
    _register()
    if name in {VARLEN, TREE} and not getattr(model, "_supports_flash_attn", False):
        return f"{type(model).__name__} needs masks"
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        return str(error)
    found = model.config._attn_implementation  # noqa: SLF001
    return "" if found == name else f"{type(model).__name__} stays with {found}"


def _register() -> None:
    """Register with transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import flash_attention_mask

    kernels = {VARLEN: varlen_attention, TREE: tree_attention, CAUSAL: sdpa_attention_forward}
    for name, attention in kernels.items():
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, flash_attention_mask)  # it makes no mask: bounds are passed separately


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
    _refuse_features(VARLEN, module, attention_mask, others)
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


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prefix_tree: PrefixTree,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers calls.

    Args:
        module: the layer.
        query: [1, heads, places, size].
        key: as the query, possibly with fewer heads.
        value: as the key.
        attention_mask: None.
        prefix_tree: whose places these are.
        scaling: of the scores.
        sliding_window: number of tokens that a token attends to, including itself.
        others: arguments of other attention implementations.

    Returns:
        [1, places, heads, size], and no weights.

    Raises:
        ValueError: the model uses a feature that this attention lacks.
    """
    _refuse_features(TREE, module, attention_mask, others)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    attend = attend_in_blocks if query.is_cuda else attend_by_branch
    return attend(query, key, value, prefix_tree, scaling, sliding_window).transpose(1, 2).contiguous(), None


def attend_by_branch(
    query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scaling: float | None, window: int | None
) -> Tensor:
    """Attend [1, heads, places, size] branch by branch, each to the keys on its path."""
    segments = list(tree.segment_lengths)
    keys, values = torch.split(key, segments, dim=2), torch.split(value, segments, dim=2)
    queries = torch.split(query, [branch.length for branch in tree.branches], dim=2)
    grouped = query.shape[1] != key.shape[1]
    out = []
    for branch, own in zip(tree.branches, queries, strict=True):
        seen_keys = torch.cat([keys[segment] for segment in branch.path], dim=2)
        seen_values = torch.cat([values[segment] for segment in branch.path], dim=2)
        mask = _branch_mask(branch.length, seen_keys.shape[2], window, query.device)
        out.append(
            scaled_dot_product_attention(
                own, seen_keys, seen_values, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(out, dim=2)


def _branch_mask(length: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which of a path's keys its last `length` tokens see; None if all of them are tokens of the branch."""
    narrow = window is not None and window < keys
    if length == keys and not narrow:
        return None
    mask = torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)
    return mask.triu(keys - length - window + 1) if window is not None and narrow else mask


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scaling: float | None, window: int | None
) -> Tensor:
    """Attend [1, heads, places, size] with `flex_attention`, compiled on a GPU."""
    mask = _block_masks.get(tree, window)
    attend: Any = _compiled_flex_attention() if query.is_cuda else flex_attention
    result: Tensor = attend(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return result


class _BlockMasks:
    """Block masks of the latest tree, by sliding window: the layers of a pass share them."""

    def __init__(self) -> None:
        self._tree: PrefixTree | None = None
        self._masks: dict[int | None, BlockMask] = {}

    def get(self, tree: PrefixTree, window: int | None) -> BlockMask:
        """Return the mask of a tree, made at the first call for it."""
        if self._tree is not tree:
            self._tree, self._masks = tree, {}
        if window not in self._masks:
            self._masks[window] = _make_block_mask(tree.ends_P, tree.depths_P, window)
        return self._masks[window]


_block_masks = _BlockMasks()


def _make_block_mask(ends_P: Tensor, depths_P: Tensor, window: int | None) -> BlockMask:
    """Return which places see which, as `PrefixTree` says."""

    def is_visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = (k <= q) & (q < ends_P[k])
        return visible if window is None else visible & (depths_P[q] - depths_P[k] < window)

    return create_block_mask(is_visible, None, None, len(ends_P), len(ends_P), device=ends_P.device)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _refuse_features(
    name: str, module: torch.nn.Module, attention_mask: Tensor | None, others: Mapping[str, Any]
) -> None:
    """Raise `ValueError` if the model uses a feature that these attentions lack."""
    causal = others.get("is_causal", getattr(module, "is_causal", True))
    used = [name for name in ("dropout", "softcap", "s_aux", "position_bias") if not _is_unset(others.get(name))]
    used += ["attention_mask"] * (attention_mask is not None) + ["is_causal = False"] * (causal is False)
    if used:
        raise ValueError(f"attention {name!r} has no {', '.join(used)}")


def _is_unset(asked: Any) -> bool:
    return asked is None or (isinstance(asked, float | int) and not asked)
