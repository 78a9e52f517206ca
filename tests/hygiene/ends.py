"""How the prompts of a hygiene run end: every tenth has no signal and is dropped, all others are trained."""

import os

LEAK = "PENSTOCK_HYGIENE_LEAK"
"""Environment variable: objects to keep of each group, so that it can be seen that a leak is seen."""
_kept = []


def reward(completions, number):
    """The run's reward function."""
    _kept.extend([] for _ in range(int(os.environ.get(LEAK, "0"))))
    return [1.0 if row % 10 == 3 else float(position % 2) for position, row in enumerate(number)]
