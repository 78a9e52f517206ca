"""Compare the last third of a run with its first; each quantity has a bound on its growth.

Whatever each group leaves behind grows by at least one element, one object, or the bytes of these per group. The bounds
are therefore a small part of that per group, plus a floor for normal fluctuation.
"""

import statistics
from collections.abc import Sequence

from msgspec import Struct

Sample = dict[str, float]
"""Quantities by `WHAT.KIND`: `server.memory`, `rollout-0.rss`, ..."""
WARM_UP, WARM_UP_GROUPS = 0.15, 500
"""Fraction of a run's groups, but at least this many groups, during which imports, pools, caches and the allocator
settle; a short run has fewer.
"""


class Bound(Struct, frozen=True):
    """Bound on the growth of a quantity between the first and the last third."""

    floor: float
    """Allowed growth for any number of groups."""
    per_group: float
    why: str


MB = 1e6
BOUNDS = {
    "memory": Bound(0.6 * MB, 20, "an id that stays in a set or a hash takes 60 bytes and more, an entry a thousand"),
    "elements": Bound(250, 0.02, "something settled that stays is one element for each group"),
    "keys": Bound(3, 0, "their number is fixed; a key that is empty is not there"),
    "clients": Bound(
        30, 0, "all pools; each keeps as many connections as were ever used at once, up to its groups in flight"
    ),
    "rss": Bound(12 * MB, 60, "the smallest object takes 16 bytes, with its place in a list or a dict 60 and more"),
    "objects": Bound(700, 0.05, "counted at rest; something that is kept is one object for each group"),
    "files": Bound(12, 0, "as clients; a file or socket left open is one for each group"),
    "threads": Bound(3, 0, "anyio keeps threads of its pool for ten seconds"),
    "tasks": Bound(2, 0, "counted at rest; one that never ends is one for each group"),
}
HELD = Bound(2000, 0.05, "at rest the trainer holds less than a step's groups, which are a hundred objects each")
LEDGER = Bound(12 * MB, 300, "Ledger.outcomes: id and end of each prompt stay in the trainer's memory, by design")
AT_MOST = {
    "server.aof": (160 * MB, "rewritten at 64 MB when it has doubled, and more is written meanwhile"),
}
BY_DESIGN = ("folder.ledger", "folder.metrics", "folder.logs", "server.rss")
"""One line per group, one line per step; the server's resident memory follows the rewrites of its file."""


class Growth(Struct, kw_only=True):
    """One quantity over a run."""

    first: float
    last: float
    """Means of the first and the last third."""
    per_1000: float
    """Slope by least squares, per 1,000 groups."""
    largest: float
    allowed: float | None
    """Allowed growth, or highest allowed value; None if the quantity grows by design."""
    well: bool


def judge(samples: Sequence[tuple[int, Sample]], groups: int, at_most: dict[str, float]) -> dict[str, Growth]:
    """Judge every quantity.

    Args:
        samples: pairs of ended groups and the quantities measured at that point.
        groups: number of groups in the run.
        at_most: highest values of single quantities, added to `AT_MOST`.
    """
    begins = max(WARM_UP * groups, min(WARM_UP_GROUPS, groups / 3))
    warm = [(ended, result) for ended, result in samples if begins <= ended]
    names = sorted({name for _, result in warm for name in result})
    limits = {name: bound for name, (bound, _) in AT_MOST.items()} | at_most
    return {name: _judge(name, [(x, f[name]) for x, f in warm if name in f], limits) for name in names}


def _judge(name: str, points: Sequence[tuple[int, float]], limits: dict[str, float]) -> Growth:
    third = max(1, len(points) // 3)
    begun, ended = points[:third], points[-third:]
    first, last = (statistics.fmean(y for _, y in part) for part in (begun, ended))
    between = statistics.fmean(x for x, _ in ended) - statistics.fmean(x for x, _ in begun)
    moved = len({x for x, _ in points}) > 1
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope if moved else 0.0
    largest = max(y for _, y in points)
    what, _, kind = name.rpartition(".")
    if name in limits:
        allowed: float | None = limits[name]
        well = largest <= limits[name]
    elif name in BY_DESIGN or name not in {f"{what}.{kind}" for kind in BOUNDS}:
        allowed, well = None, True
    else:
        bound = {"train-0.rss": LEDGER, "train-0.objects": HELD}.get(name, BOUNDS[kind])
        allowed = bound.floor + bound.per_group * between
        well = last - first <= allowed
    return Growth(first=first, last=last, per_1000=slope * 1000, largest=largest, allowed=allowed, well=well)
