"""Ends of the prompts in a hygiene run: every tenth has no signal and is dropped, all others are trained."""

import os

LEAK = "PENSTOCK_HYGIENE_LEAK"
"""Environment variable: objects to leak for each group, to prove that a leak is detected."""
_kept = []


def reward(completions, number):
    """The run's reward function."""
    _kept.extend([] for _ in range(int(os.environ.get(LEAK, "0"))))
    return [1.0 if row % 10 == 3 else float(position % 2) for position, row in enumerate(number)]
