"""A simulated customer: asks for a price, haggles, and buys when the offer is within the budget."""

import random
import re


class Customer:
    """Buys a lamp. The reward is 1 for a sale, less 0.2 for each offer that was too high."""

    replayable = True

    def reset(self, seed: int) -> str:
        self.budget = random.Random(seed).randrange(200, 600)
        self.refused, self.sold = 0, False
        return "What does it cost?"

    def respond(self, message: str) -> str | None:
        offers = [int(number) for number in re.findall(r"\d+", message)]
        if not offers:
            return "A number, please."
        if offers[-1] > self.budget:
            self.refused += 1
            return "Less, please."
        self.sold = True
        return None

    def get_reward(self) -> float:
        return float(self.sold) - 0.2 * self.refused
