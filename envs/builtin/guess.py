"""Guess a number: a minimal environment whose state the model's calls change."""

from random import Random
from typing import Any, Literal

from envs.contract import EnvironmentFailure


class Guess:
    """Higher or lower. The reward is 1.0 once the number is found.

    Rows may set `secret`, `low` and `high`. Without `secret` it is drawn from the seed, one for each group.
    """

    replayable = True

    def __init__(self) -> None:
        self.secret = 0
        self.guesses: list[int] = []

    def reset(self, secret: int | None = None, low: int = 1, high: int = 100, seed: int = 0, **fields: Any) -> str:  # noqa: ARG002
        """Choose the number.

        Args:
            secret: the number; drawn if None.
            low: smallest possible number.
            high: largest possible number.
            seed: seed for drawing the number.
            **fields: other columns of the row.
        """
        if secret is None and low <= high:
            secret = Random(seed).randint(low, high)
        if secret is None or not low <= secret <= high:
            raise EnvironmentFailure(f"the row's secret {secret} is not between {low} and {high}")
        self.secret = secret
        self.guesses = []
        return f"I am thinking of a whole number from {low} to {high}. Guess it."

    def guess(self, number: int) -> Literal["higher", "lower", "correct"]:
        """Guess the number.

        Args:
            number: Your guess.

        Returns:
            Whether the number is higher or lower than the guess, or the guess is correct.
        """
        self.guesses.append(number)
        if number == self.secret:
            return "correct"
        return "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        """Return 1.0 if the number was found."""
        return float(self.secret in self.guesses)
