"""Choose the engine for a request: the one with its prefix in the cache, unless that one has much more to do.

All completions of a group start with the same tokens, and each turn of a completion starts with the previous turns. So
a completion stays with the engine that sampled its last turn, and a group has a preferred engine: rendezvous hashing
ranks the engines for each group, so adding or removing an engine moves only the groups that it ranks first for. Both
give way to load: an engine gets no request that would bring it above a factor of the mean load plus `SLACK`, while
another engine has less to do. A completion that moves at its first turn costs one prompt that others read too; one that
moves later costs its whole history. So `FIRST_TURN_FACTOR` is the smaller one.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

FIRST_TURN_FACTOR: Final = 1.1
"""Multiple of the mean load for a completion's first turn."""
LATER_TURN_FACTOR: Final = 1.25
"""The same for later turns."""
SLACK: Final = 4
"""Requests above that multiple: at a low load one more request slows an engine little, so groups stay together."""


class Candidate(NamedTuple):
    """An engine that a request may go to."""

    url: str
    load: int
    """Requests of this client that it works on."""
    limit: int
    """Upper bound of `load`."""


@lru_cache(maxsize=4096)
def rank_engines(group: str, urls: tuple[str, ...]) -> tuple[str, ...]:
    """Order the engines by preference for a group. Removing one leaves the order of the others unchanged."""
    rank = {url: blake2b(f"{url}\n{group}".encode(), digest_size=8).digest() for url in urls}
    return tuple(sorted(urls, key=rank.__getitem__, reverse=True))


def max_load(factor: float, candidates: Sequence[Candidate]) -> int:
    """Return the load, including the next request, that one engine may have while others have less to do."""
    return math.ceil(factor * (sum(candidate.load for candidate in candidates) + 1) / len(candidates)) + SLACK


def choose_engine(group: str, last_url: str, candidates: Sequence[Candidate]) -> str | None:
    """Return the URL of the engine for a request; None if every candidate is at its limit.

    Args:
        group: id of the request's group; empty: the least loaded engine is chosen.
        last_url: the engine that sampled the completion's last turn; empty at the first turn.
        candidates: the engines that may serve the request.
    """
    free = [candidate for candidate in candidates if candidate.load < candidate.limit]
    if not free:
        return None
    if group:
        most = max_load(LATER_TURN_FACTOR, candidates)
        if any(candidate.url == last_url and candidate.load < most for candidate in free):
            return last_url
        most = max_load(FIRST_TURN_FACTOR, candidates)
        allowed = {candidate.url for candidate in free if candidate.load < most}
        for url in rank_engines(group, tuple(candidate.url for candidate in candidates)):
            if url in allowed:
                return url
    return min(free, key=lambda candidate: candidate.load).url
