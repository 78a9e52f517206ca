"""Intended end of each prompt of a chaos run, by its row number alone, and the rewards that cause it."""

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


def intended(row: int) -> str:
    """Return the end that a prompt must have, with kills or without."""
    if row % 25 == 4:
        return REFUSED
    if row % 50 == 9:
        return UNREADABLE
    if row % 10 == 3:
        return NO_SIGNAL
    if row % 20 == 7:
        return UNMEASURED
    return TRAINED


def reward(completions, number):
    """The run's reward function."""
    results = []
    for position, row in enumerate(number):
        end = intended(row)
        results.append(None if end == UNMEASURED else 1.0 if end == NO_SIGNAL else float(position % 2))
    return results
