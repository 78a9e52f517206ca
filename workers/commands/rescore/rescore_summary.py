"""Compare old and new rewards: means, correlation, order within groups, and changes of validity."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from stream.validity import Measured, Reward


@dataclass(frozen=True, slots=True)
class RewardComparison:
    """Old and new reward of one completion."""

    prompt: str
    environment: str
    old: Reward | None
    new: Reward | None


class EnvironmentSummary(Struct, kw_only=True):
    """Comparison for one environment, over the completions that are measured both times."""

    environment: str
    completions: int
    both_measured: int
    old_mean: float | None
    new_mean: float | None
    correlation: float | None
    """Pearson correlation; None if either side is constant."""
    order_agreement: float | None
    """Fraction of pairs that keep their order, over pairs of one group with different old rewards; a new tie counts
    half."""


class RescoreSummary(Struct, kw_only=True):
    """Comparison of old and new rewards over all archived groups."""

    groups: int
    missing: int
    """Groups in the ledger that are missing from the archive."""
    environments: list[EnvironmentSummary]
    """One entry per environment; with several, `all` comes first."""
    validity: dict[str, int]
    """Completions by change of validity: `measured -> raised`; unchanged: `measured`, `timeout`, ..."""


def summarize(comparisons: Sequence[RewardComparison], *, groups: int, missing: int) -> RescoreSummary:
    """Summarize the comparisons by environment and over all."""
    by_environment: dict[str, list[RewardComparison]] = defaultdict(list)
    for each in comparisons:
        by_environment[each.environment].append(each)
    rows = [_summary(name, part) for name, part in sorted(by_environment.items())]
    if len(rows) > 1:
        rows.insert(0, _summary("all", comparisons))
    changes = Counter(_validity_change(each) for each in comparisons)
    return RescoreSummary(groups=groups, missing=missing, environments=rows, validity=dict(changes.most_common()))


def _summary(name: str, comparisons: Sequence[RewardComparison]) -> EnvironmentSummary:
    pairs = [
        (each.prompt, each.old.value, each.new.value)
        for each in comparisons
        if isinstance(each.old, Measured) and isinstance(each.new, Measured)
    ]
    old, new = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    return EnvironmentSummary(
        environment=name,
        completions=len(comparisons),
        both_measured=len(pairs),
        old_mean=_mean(old),
        new_mean=_mean(new),
        correlation=correlation(old, new),
        order_agreement=order_agreement(pairs),
    )


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the Pearson correlation; None for fewer than two values, or if either side is constant."""
    mean_x, mean_y = _mean(xs), _mean(ys)
    if len(xs) < 2 or mean_x is None or mean_y is None or len(set(xs)) == 1 or len(set(ys)) == 1:
        return None
    dx, dy = [x - mean_x for x in xs], [y - mean_y for y in ys]
    together, alone_x, alone_y = (
        math.fsum(a * b for a, b in zip(left, right, strict=True)) for left, right in ((dx, dy), (dx, dx), (dy, dy))
    )
    return together / math.sqrt(alone_x * alone_y)


def order_agreement(triples: Sequence[tuple[str, float, float]]) -> float | None:
    """Return how often two completions of a prompt keep their order.

    Args:
        triples: (prompt, old reward, new reward).

    Returns:
        Fraction of the pairs of one prompt with different old rewards; a new tie counts half; None without pairs.
    """
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for prompt, old, new in triples:
        groups[prompt].append((old, new))
    kept = [
        0.5 if a[1] == b[1] else float((a[0] < b[0]) == (a[1] < b[1]))
        for group in groups.values()
        for a, b in itertools.combinations(group, 2)
        if a[0] != b[0]
    ]
    return _mean(kept)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _validity_change(comparison: RewardComparison) -> str:
    before, now = _validity(comparison.old), _validity(comparison.new)
    return now if before == now else f"{before} -> {now}"


def _validity(reward: Reward | None) -> str:
    if reward is None:
        return "not scored"
    return "measured" if isinstance(reward, Measured) else str(reward.reason)
