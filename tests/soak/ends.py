"""Intended end of each prompt of a soak run, by its number alone, and the rewards that cause it.

Scorers load this file by its path, so it imports nothing of ours.
"""

import os
import zlib
from itertools import count, islice

TRAINED = "trained"
NO_SIGNAL = "dropped:zero_variance"
UNMEASURED = "dropped:no_valid_row"
REFUSED = "dead:prompts"
"""The chat template refuses the prompt."""
UNREADABLE = "dead:scored"
"""The engine returns a token that the trainer's model does not know."""

GROUP_SIZE = 2
VOCABULARY = 64
"""Number of tokens that the trainer's model knows."""
LEAK = "PENSTOCK_HYGIENE_LEAK"
"""Environment variable: objects that a scorer keeps of each group, to prove that a leak is detected."""
_kept = []


def intended(number: int) -> str:
    """Return the end that a prompt must have, with kills or without."""
    if number % 25 == 4:
        return REFUSED
    if number % 50 == 9:
        return UNREADABLE
    if number % 10 == 3:
        return NO_SIGNAL
    if number % 20 == 7:
        return UNMEASURED
    return TRAINED


def numbers_with(amount: int, *ends: str) -> list[int]:
    """Return the lowest numbers whose prompts have one of these ends."""
    return list(islice((number for number in count() if intended(number) in ends), amount))


def reward(completions, number):
    """Reward the completions of a group as its intended end demands."""
    _kept.extend([] for _ in range(int(os.environ.get(LEAK, "0"))))
    results = []
    for position, row in enumerate(number):
        end = intended(row)
        results.append(None if end == UNMEASURED else 1.0 if end == NO_SIGNAL else float(position % 2))
    return results


def by_chance(completions, number, **columns):
    """Reward each text by a draw that it determines; about one reward in eleven is unmeasured."""
    drawn = [zlib.crc32(f"{row}:{text}".encode()) for text, row in zip(completions, number, strict=True)]
    return [None if each % 11 == 0 else each % 3 / 2 for each in drawn]
