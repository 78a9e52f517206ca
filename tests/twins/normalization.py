"""Naive twins of the normalisers: one value at a time, with exact sums."""

import math
from collections.abc import Hashable
from fractions import Fraction
from functools import cache


def whiten(values, mask, weights=None, *, unbiased, epsilon, shift):
    """Whiten a flat list; a value of weight n counts as n values."""
    counted = [(Fraction(v), 1 if weights is None else weights[i]) for i, v in enumerate(values) if mask[i]]
    number = sum(n for _, n in counted)
    if not number:
        return [0.0] * len(values)
    mean = sum((v * n for v, n in counted), Fraction(0)) / number
    divisor = number - 1 if unbiased else number
    variance = sum((n * (v - mean) ** 2 for v, n in counted), Fraction(0)) / (divisor if divisor > 0 else 1)
    scale = math.sqrt(float(variance) + epsilon)
    return [
        float(Fraction(v) - mean) / scale + (0.0 if shift else float(mean)) if mask[i] else 0.0
        for i, v in enumerate(values)
    ]


def normalize(
    values: list[float],
    pools: list[Hashable],
    valid: list[bool],
    voting: list[bool] | None = None,
    *,
    mean: str,
    std: str,
    leave_one_out: bool,
    unbiased: bool,
    epsilon: float,
):
    """Normalise a flat list with a pool name per value; only `voting` values count in statistics of the batch."""
    everyone = range(len(values))
    in_batch = [i for i in everyone if valid[i] and (voting is None or voting[i])]

    @cache
    def pool(level: str, i: int) -> list[int]:
        return in_batch if level == "batch" else [j for j in everyone if valid[j] and pools[j] == pools[i]]

    @cache
    def centred(i: int) -> Fraction:
        compared = [] if mean == "none" else [j for j in pool(mean, i) if not (leave_one_out and j == i)]
        if mean != "none" and not compared:
            return Fraction(0)  # no sibling
        return Fraction(values[i]) - sum((Fraction(values[j]) for j in compared), Fraction(0)) / max(1, len(compared))

    @cache
    def spread(members: tuple[int, ...]) -> float:
        divisor = len(members) - (1 if unbiased else 0)
        return math.sqrt(sum(centred(j) ** 2 for j in members) / divisor) if divisor > 0 else 1.0

    def result(i: int) -> float:
        if std == "none":
            return float(centred(i))
        return float(centred(i)) / (spread(tuple(pool(std, i))) + epsilon)

    return [result(i) if valid[i] else 0.0 for i in everyone]
