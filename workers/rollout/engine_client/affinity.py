"""Which engine a request goes to: the one that has its prefix in its cache, unless that one has much more to do.

All completions of a group begin with the same tokens, and each turn of a completion with those of the turn before. So
a completion stays with the engine that sampled its last turn, and a group has a home: rendezvous hashing ranks the
engines for each group, so that an engine that comes or goes moves no group but those that are its own. Both give way to
load: no engine is given more than so many times the mean, and `SLACK` requests, while another one has less to do. A
completion that goes elsewhere costs a prompt that others read too at its first turn, and later all that is its own; so
`FIRST` is the smaller one.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

FIRST_TURN_FACTOR: Final = 1.1
"""Times the mean, for a completion's first turn."""
LATER_TURN_FACTOR: Final = 1.25
SLACK: Final = 4
"""So that few requests are not torn apart: an engine that has little to do is not much slower for one more."""


class Candidate(NamedTuple):
    """An engine that could be asked."""

    url: str
    load: int
    """Requests of ours that it works on."""
    limit: int
    """How many it may work on."""


@lru_cache(maxsize=4096)
def rank_engines(group: str, urls: tuple[str, ...]) -> tuple[str, ...]:
    """The engines that a group belongs to, the first above all; the others' order is the same without it."""
    rank = {url: blake2b(f"{url}\n{group}".encode(), digest_size=8).digest() for url in urls}
    return tuple(sorted(urls, key=rank.__getitem__, reverse=True))


def max_load(factor: float, candidates: Sequence[Candidate]) -> int:
    """Requests that one engine may have, the next one included, while others have less to do."""
    return math.ceil(factor * (sum(seat.load for seat in candidates) + 1) / len(candidates)) + SLACK


def choose_engine(group: str, last_url: str, candidates: Sequence[Candidate]) -> str | None:
    """The engine that is to be asked; None where each has as many requests as it may.

    Args:
        group: whose request it is; empty: nobody's, so that load alone decides.
        last_url: the engine that sampled the completion's last turn; empty: none did.
        candidates: those that could be asked.
    """
    free = [seat for seat in candidates if seat.load < seat.limit]
    if not free:
        return None
    if group:
        if any(seat.url == last_url and seat.load < max_load(LATER_TURN_FACTOR, candidates) for seat in free):
            return last_url
        limit = max_load(FIRST_TURN_FACTOR, candidates)
        allowed = {seat.url for seat in free if seat.load < limit}
        for url in rank_engines(group, tuple(seat.url for seat in candidates)):
            if url in allowed:
                return url
    return min(free, key=lambda seat: seat.load).url
