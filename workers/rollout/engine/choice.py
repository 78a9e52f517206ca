"""Which engine a request goes to: the one that has its prefix in its cache, unless that one has much more to do.

All completions of a group begin with the same tokens, and each turn of a completion with those of the turn before. So
a completion stays with the engine that sampled its last turn, and a group has a home: rendezvous hashing ranks the
engines for each group, so that an engine that comes or goes moves no group but those that are its own. Both give way to
load: no engine is given more than `SPREAD` times the mean, and `SLACK` requests, while another one has less to do.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

SPREAD: Final = 1.25
SLACK: Final = 4
"""So that few requests are not torn apart: an engine that has little to do is not much slower for one more."""


class Seat(NamedTuple):
    """An engine that could be asked."""

    url: str
    load: int
    """Requests of ours that it works on."""
    limit: int
    """How many it may work on."""


def home(group: str, urls: Sequence[str]) -> str:
    """The engine that a group belongs to."""
    return max(urls, key=lambda url: _rank(group, url))


def bound(seats: Sequence[Seat]) -> int:
    """Requests that one engine may have, the next one included, while others have less to do."""
    return math.ceil(SPREAD * (sum(seat.load for seat in seats) + 1) / len(seats)) + SLACK


def choose(group: str, last: str, seats: Sequence[Seat]) -> str | None:
    """The engine that is to be asked; None where each has as many requests as it may.

    Args:
        group: whose request it is; empty: nobody's, so that load alone decides.
        last: the engine that sampled the completion's last turn; empty: none did.
        seats: those that could be asked.
    """
    free = [seat for seat in seats if seat.load < seat.limit]
    if not free:
        return None
    if group:
        most = bound(seats)
        fitting = {seat.url for seat in free if seat.load < most}
        if last in fitting:
            return last
        for url in sorted((seat.url for seat in seats), key=lambda url: _rank(group, url), reverse=True):
            if url in fitting:
                return url
    return min(free, key=lambda seat: seat.load).url


def _rank(group: str, url: str) -> bytes:
    return blake2b(f"{url}\n{group}".encode(), digest_size=8).digest()
