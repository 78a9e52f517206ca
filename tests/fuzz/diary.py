"""An environment with attributes of every kind that a snapshot holds, and a reward function that reads them all."""

import datetime as dt
from collections import Counter, deque
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction


class Mood(Enum):
    """Mood of a day."""

    GOOD = "good"
    BAD = "bad"


@dataclass
class Entry:
    """One line of the diary."""

    text: str
    mood: Mood


class Diary:
    """Records its entries in attributes of many types."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.begun = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
        self.pages = {1: "one", (2, 3): {"a", "b"}}
        self.last = deque([1, 2.5, "three"], maxlen=5)
        self.words = Counter("abracadabra")
        self.price = Decimal("1.10")
        self.share = Fraction(1, 3)
        self.huge = 2**200
        self.raw = b"\x00\xff"
        self.handle = lambda: None

    def reset(self, **_row):
        """Begin a new diary."""
        self.entries = [Entry("first", Mood.GOOD)]
        return "Dear diary,"

    def write(self, text: str) -> str:
        """Add an entry.

        Args:
            text: what happened.
        """
        self.entries.append(Entry(text, Mood.BAD))
        return "Noted."


def pages(environments, completions):
    """Read everything that is left of the diaries."""
    return [float(len(repr(vars(diary))) % 7) for diary in environments]
