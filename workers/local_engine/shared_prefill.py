"""The order in which sequences that begin alike are computed, so that what they share is computed once."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

TOKEN_BYTES: Final = 4
LEAST_SAVED: Final = 48
"""Tokens that a pass of its own over shared beginnings must save: a small pass costs as much as a step. Chosen."""


class SharedPass(NamedTuple):
    """A beginning that several sequences share: one of them computes it, and the others copy its keys and values."""

    level: int
    """Number of shorter beginnings that must be computed first. Beginnings of one level can share a forward pass."""
    row: int
    """The sequence that computes it."""
    end: int
    """Tokens of the beginning."""
    copies: tuple[int, ...]
    """The sequences that copy it."""


def common_length(one: bytes, other: bytes) -> int:
    """Return the number of tokens, as int32, with which both sequences begin."""
    count = min(len(one), len(other)) // TOKEN_BYTES
    differs = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


def longest_shared(ordered: Sequence[tuple[bytes, int]], tokens: bytes) -> tuple[int, int]:
    """Return the slot of the sequence that shares the longest beginning with `tokens`, and its length, or (0, 0).

    Args:
        ordered: sequences with their slots, in lexicographic order, in which the best one is a neighbour of `tokens`.
        tokens: of another sequence.
    """
    place = bisect(ordered, (tokens, -1))
    found = [(common_length(key, tokens), slot) for key, slot in ordered[max(0, place - 1) : place + 1]]
    length, slot = max(found, default=(0, 0))
    return (slot, length) if length else (0, 0)


def plan_shared_passes(sequences: Sequence[bytes], known: Sequence[int]) -> list[SharedPass]:
    """Find shared beginnings that are worth a pass, shorter ones first. Each ends before the last token of a sequence.

    Args:
        sequences: tokens of each sequence as int32.
        known: number of tokens of each sequence that are computed already.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    shared = [common_length(sequences[a], sequences[b]) for a, b in pairwise(order)]
    lengths = [len(sequences[row]) // TOKEN_BYTES for row in order]
    have = [known[row] for row in order]
    found = list(_split(0, len(order), 0, lengths, have, shared))
    return sorted(
        SharedPass(each.level, order[each.row], each.end, tuple(order[copy] for copy in each.copies)) for each in found
    )


def _split(
    first: int, stop: int, level: int, lengths: Sequence[int], have: list[int], shared: Sequence[int]
) -> Iterator[SharedPass]:
    """Yield the passes for neighbours in lexicographic order; `have` is raised by what a pass gives."""
    if stop - first < 2:
        return
    branch = min(shared[first : stop - 1])
    end = min(branch, min(lengths[first:stop]) - 1)
    members = range(first, stop)
    row = max(members, key=lambda member: (min(have[member], end), -member))
    copies = tuple(member for member in members if member != row and have[member] < end)
    if sum(end - have[member] for member in copies) >= LEAST_SAVED:
        yield SharedPass(level, row, end, copies)
        level += 1
        for member in (row, *copies):
            have[member] = max(have[member], end)
    start = first
    for place in range(first, stop):
        if place == stop - 1 or shared[place] == branch:
            if (start, place + 1) != (first, stop):
                yield from _split(start, place + 1, level, lengths, have, shared)
            start = place + 1
