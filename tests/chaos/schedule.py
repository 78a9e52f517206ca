"""Seeded schedule of kills.

A blow kills one or more processes at once. It falls at one of these moments:

* `progress`: a fraction of the run is done, so that the whole schedule fits into a run on any machine;
* `soon`: shortly after the previous blow, whatever the run is doing, recovery included;
* `checkpoint`: a checkpoint's folder appears, before the trainer has acknowledged its groups;
* `fsync` (server only): during a background `fsync`, while later writes exist in memory alone;
* `power` (server only): as in a power failure, the last second of writes is cut from the server's file.
"""

import random
from dataclasses import dataclass
from typing import Literal

SLOTS = ("feed", "rollout", "rollout", "score", "score", "train", "engine")
SERVER = "server"
_SIZES, _WEIGHTS = (1, 2, 3, len(SLOTS)), (60, 22, 12, 6)
_FIRST, _LAST = 0.03, 0.8
_LONGEST_SOON_S = 2.0
_SERVER_MOMENTS: tuple["When", ...] = ("fsync", "power", "checkpoint", "power", "progress")

When = Literal["progress", "soon", "checkpoint", "fsync", "power"]


@dataclass(kw_only=True)
class Blow:
    """One moment of the schedule."""

    when: When
    roles: tuple[str, ...]
    fraction: float = 0.0
    """Fraction of prompts that have ended before the blow falls."""
    delay_s: float = 0.0


def schedule(kills: int, seed: int, server_kills: int = 0) -> list[Blow]:
    """Return blows with `kills` kills of roles, every role once before any twice, and `server_kills` of the server."""
    chance = random.Random(seed)
    blows = _on_roles(kills, chance)
    for number in range(server_kills):
        blow = Blow(when=_SERVER_MOMENTS[number % len(_SERVER_MOMENTS)], roles=(SERVER,))
        # Never directly before a `soon` blow, which belongs to its predecessor.
        places = [place for place in range(len(blows) + 1) if place == len(blows) or blows[place].when != "soon"]
        blows.insert(chance.choice(places), blow)
    paced = [blow for blow in blows if blow.when != "soon"]
    for place, blow in enumerate(paced):
        blow.fraction = _FIRST + (_LAST - _FIRST) * (place + chance.random()) / len(paced)
    return blows


def _on_roles(kills: int, chance: random.Random) -> list[Blow]:
    bag: list[str] = []
    blows: list[Blow] = []
    while kills:
        if len(blows) % 4 == 1:
            blow = Blow(when="checkpoint", roles=("train",))
        else:
            size = min(kills, *chance.choices(_SIZES, _WEIGHTS))
            while len(bag) < size:
                bag = chance.sample(SLOTS, len(SLOTS)) + bag
            drawn = tuple(bag.pop() for _ in range(size))
            last = size == kills
            blow = Blow(when="soon" if blows and not last and chance.random() < 0.35 else "progress", roles=drawn)
            blow.delay_s = chance.uniform(0.0, _LONGEST_SOON_S if blow.when == "soon" else 0.2)
        blows.append(blow)
        kills -= len(blow.roles)
    return blows
