"""The prefix tree of a micro-batch's rows: a token that several rows share is forwarded once.

Rows of a group share their prompt, and rows of one completion share turns. The tree has one place for each distinct
prefix of the rows, so a group of G rows needs P + G * R places instead of G * (P + R). Only the forward pass is shared:
targets, weights and statistics stay those of rows, and states are looked up by row and column.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

Tokens = NDArray[np.int64]
"""Token ids of one row, without padding."""
_GPU_MULTIPLE = 128
"""Places on a GPU are padded to a multiple of this, so that few shapes are compiled."""


class Branch(NamedTuple):
    """The tokens with which a row leaves the rows before it, in sorted order."""

    length: int
    """Number of its places."""
    path: tuple[int, ...]
    """Segments from the root to the row's last token."""


class PrefixTree(NamedTuple):
    """Rows as the places of their distinct prefixes, in depth-first order.

    Example, rows [1 2 3 4], [1 2 3 5] and [1 2 6]::

        tokens_P         1 2 3 4 5 6
        depths_P         0 1 2 3 3 2
        ends_P           6 6 5 4 5 6
        places_MT        [0 1 2 3] [0 1 2 4] [0 1 5 0]
        segment_lengths  2 1 1 1 1
        branches         (4, (0 1 2)) (1, (0 1 3)) (1, (0 4))

    Place q attends to place k if q is in the subtree of k: `k <= q < ends_P[k]`. With a sliding window,
    `depths_P[q] - depths_P[k] < window` as well.
    """

    tokens_P: Tensor
    """int64, the token at each place."""
    depths_P: Tensor
    """int64, its position in its rows."""
    ends_P: Tensor
    """int64, one past the last place of its subtree."""
    places_MT: Tensor
    """int64, the place of each token of each row; 0 in padding."""
    segment_lengths: tuple[int, ...]
    """Numbers of places of the segments, in order. Within a segment no row begins, ends or branches off."""
    branches: tuple[Branch, ...]
    """In order of places, which they partition."""

    @classmethod
    def from_rows(cls, rows: Sequence[Tokens]) -> Self:
        """Build the tree of rows, none of them empty."""
        order = sort_rows(rows)
        common = [0, *(common_prefix(rows[a], rows[b]) for a, b in pairwise(order))]
        lengths = [len(rows[row]) for row in order]
        starts = np.cumsum([0, *(n - shared for n, shared in zip(lengths, common, strict=True))])
        places_MT = np.zeros((len(rows), max(lengths)), dtype=np.int64)
        tokens_P, depths_P, ends_P = (np.empty(starts[-1], dtype=np.int64) for _ in range(3))
        cuts = {0, int(starts[-1])}
        for i, (row, shared, n) in enumerate(zip(order, common, lengths, strict=True)):
            own = slice(starts[i], starts[i + 1])
            places_MT[row, :shared] = places_MT[order[i - 1], :shared]
            places_MT[row, shared:n] = np.arange(own.start, own.stop)
            tokens_P[own], depths_P[own] = rows[row][shared:], np.arange(shared, n)
            cuts |= {int(own.start), int(places_MT[row, shared - 1]) + 1 if shared else 0}
        end_at_depth = np.full(max(lengths), starts[-1])
        for i in reversed(range(len(order))):
            ends_P[starts[i] : starts[i + 1]] = end_at_depth[common[i] : lengths[i]]
            end_at_depth[common[i] :] = starts[i]
        bounds = np.array(sorted(cuts))
        branches = [
            Branch(n - shared, tuple(_segments(places_MT[row, :n], bounds)))
            for row, shared, n in zip(order, common, lengths, strict=True)
            if n > shared
        ]
        return cls(
            tokens_P=torch.from_numpy(tokens_P),
            depths_P=torch.from_numpy(depths_P),
            ends_P=torch.from_numpy(ends_P),
            places_MT=torch.from_numpy(places_MT),
            segment_lengths=tuple(np.diff(bounds).tolist()),
            branches=tuple(branches),
        )

    def to(self, device: torch.device) -> Self:
        """Return the tree on a device; on a GPU with padding places that attend to themselves alone."""
        more = -len(self.tokens_P) % _GPU_MULTIPLE if device.type == "cuda" else 0
        padding = torch.arange(len(self.tokens_P) + 1, len(self.tokens_P) + 1 + more)
        padded = self._replace(
            tokens_P=pad(self.tokens_P, (0, more)),
            depths_P=pad(self.depths_P, (0, more)),
            ends_P=torch.cat([self.ends_P, padding]),
        )
        tensors = ("tokens_P", "depths_P", "ends_P", "places_MT")
        return padded._replace(**{name: getattr(padded, name).to(device, non_blocking=True) for name in tensors})


def sort_rows(rows: Sequence[Tokens]) -> list[int]:
    """Return row numbers in lexicographic order, in which rows with a long common prefix are neighbours."""
    return sorted(range(len(rows)), key=lambda number: row_key(rows[number]))


def row_key(row: Tokens) -> bytes:
    """Return bytes whose order is the lexicographic order of rows."""
    return row.astype(">u4").tobytes()


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Return the number of tokens with which both rows begin."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def count_places(rows: Sequence[Tokens]) -> int:
    """Return the number of distinct prefixes of the rows: the places of their tree."""
    in_order = [rows[number] for number in sort_rows(rows)]
    return sum(map(len, rows)) - sum(common_prefix(a, b) for a, b in pairwise(in_order))


def _segments(places_T: NDArray[np.int64], bounds: NDArray[np.int64]) -> list[int]:
    """Return the segments in which these places lie, ascending."""
    segments: list[int] = np.unique(np.searchsorted(bounds, places_T, side="right") - 1).tolist()
    return segments
