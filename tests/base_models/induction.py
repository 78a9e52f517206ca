"""Writes induction heads into a random Qwen3: it can copy what stands in its context before it is trained.

A small model learns to copy names from a prompt only after very many tokens, because two layers have to find each
other: one that tells each position which tokens came before it, and one that looks for the position whose predecessors
are the current tokens. These heads (Olsson et al., 2022) are written by hand; training refines them.

::

    embedding   content of the token, and a constant
    layer 0     head k attends k positions back, and copies a part of the content there to the field `_BEFORE[k]`
    layer 2     two heads attend to positions that follow the same tokens as the next position will, and copy the
                content there: the first and the second half

Comparing three tokens instead of one makes a copy go on at the right place after a value that differs from the prompt.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor

_CONTENT: Final = 64
"""Residual dimensions with a token's content, from 0."""
_BEFORE: Final = ((64, 24), (88, 20), (108, 16))
"""First residual dimension and width of the fields with the content of the tokens 1, 2 and 3 positions before."""
_CONSTANT: Final = 124
"""Residual dimension that is equal for all tokens."""
_WEIGHTS: Final = (1.0, 0.8, 0.6)
"""Weights of the three tokens when contexts are compared."""
_SHARPNESS: Final = 6.0
"""Weight of the norm of the queries: large, so that attention is on one position."""
_GAIN: Final = 6.0
"""Factor of the copied content."""
_SLOW: Final = 0.007
"""Largest rotation per token, in radians, of dimensions that compare content over hundreds of tokens."""
_MATCHING_LAYER: Final = 2


def write_induction_heads(model: Any, seed: int) -> None:
    """Replace the embedding, three heads of the first layer and two heads of the third layer.

    Args:
        model: a Qwen3 with three layers, a width of at least 125, as many key as query heads, and heads of width 32.
        seed: seed of embeddings and projections.
    """
    generator = torch.Generator().manual_seed(seed)
    width = model.config.head_dim
    first, second = (model.model.layers[i].self_attn for i in (0, _MATCHING_LAYER))
    with torch.no_grad():
        embedding_VH = model.model.embed_tokens.weight.zero_()
        content_VC = embedding_VH[:, :_CONTENT].normal_(0, 1, generator=generator)
        content_VC /= content_VC.norm(dim=1, keepdim=True)
        embedding_VH[:, _CONSTANT] = 0.3
        basis_CC = torch.linalg.qr(torch.randn(_CONTENT, _CONTENT, generator=generator))[0]
        for head, (start, size) in enumerate(_BEFORE):
            rows = _clear(first, head, width)
            _attend_back(first, rows, head + 1, _rotation(model.config))
            first.v_proj.weight[rows.start : rows.start + size, :_CONTENT] = basis_CC[:size] * 0.1
            first.o_proj.weight[start : start + size, rows.start : rows.start + size] = torch.eye(size)
        for head in range(2):
            rows = _clear(second, head, width)
            _compare_contexts(second, rows, basis_CC, _comparison(model.config, generator))
            half_DC = torch.linalg.qr(torch.randn(_CONTENT, _CONTENT, generator=generator))[0][:width]
            second.v_proj.weight[rows, :_CONTENT] = half_DC * 0.1
            second.o_proj.weight[:_CONTENT, rows] = half_DC.T * _GAIN
        for attention in (first, second):
            attention.q_norm.weight.fill_(_SHARPNESS)


def _rotation(config: Any) -> Tensor:
    """Return the rotation per token of each pair of a head's dimensions, in radians."""
    half = config.head_dim // 2
    rotation: Tensor = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    return rotation


def _clear(attention: Any, head: int, width: int) -> slice:
    """Set a head's weights to 0; return its rows."""
    rows = slice(head * width, (head + 1) * width)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[rows] = 0
    attention.o_proj.weight[:, rows] = 0
    return rows


def _attend_back(attention: Any, rows: slice, positions: int, rotation_d: Tensor) -> None:
    """Give all keys of a head the same direction, and all queries this direction turned back by some positions."""
    start, middle, stop = rows.start, (rows.start + rows.stop) // 2, rows.stop
    attention.k_proj.weight[start:middle, _CONSTANT] = 1.0
    attention.q_proj.weight[start:middle, _CONSTANT] = torch.cos(positions * rotation_d)
    attention.q_proj.weight[middle:stop, _CONSTANT] = -torch.sin(positions * rotation_d)


def _comparison(config: Any, generator: torch.Generator) -> list[Tensor]:
    """Return a random projection of each field of `_BEFORE` to the slowly rotating dimensions of a head."""
    width = config.head_dim
    slow = [i for i, speed in enumerate(_rotation(config)) if speed < _SLOW]
    compared = [*slow, *(i + width // 2 for i in slow)]
    projections = []
    for _, size in _BEFORE:
        compare_DF = torch.zeros(width, size)
        compare_DF[compared] = torch.randn(len(compared), size, generator=generator) / math.sqrt(size)
        projections.append(compare_DF)
    return projections


def _compare_contexts(attention: Any, rows: slice, basis_CC: Tensor, projections: list[Tensor]) -> None:
    """Let keys say which tokens came before them, and queries which tokens come before the position to predict."""
    current = (0, _CONTENT)
    for weight, (start, size), (before, known), compare_DF in zip(
        _WEIGHTS, _BEFORE, (current, *_BEFORE), projections, strict=False
    ):
        attention.k_proj.weight[rows, start : start + size] += weight * compare_DF
        read = weight * compare_DF @ basis_CC[:size] if known == _CONTENT else weight * compare_DF
        attention.q_proj.weight[rows, before : before + read.shape[1]] += read
