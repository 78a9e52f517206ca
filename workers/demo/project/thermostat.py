"""An environment: bring a room to a temperature. Any class with a `reset` is one; its other methods are tools."""

import random


class Thermostat:
    replayable = True

    def reset(self, start: int, target: int, **row):
        self.degrees, self.target, self.calls = start, target, 0
        return f"The room has {start} degrees. It should have {target}."

    def heat(self, degrees: int) -> str:
        """Make the room warmer.

        Args:
            degrees: By how much, from 1 to 9.
        """
        return self._change(degrees)

    def cool(self, degrees: int) -> str:
        """Make the room colder.

        Args:
            degrees: By how much, from 1 to 9.
        """
        return self._change(-degrees)

    def get_reward(self) -> float:
        return max(0.0, 1 - abs(self.degrees - self.target) / 10)

    def rows(self, split: str = "train"):
        rng = random.Random(split)
        for _ in range(32 if split == "eval" else 2000):
            yield {"start": rng.randint(10, 30), "target": rng.randint(10, 30)}

    def _change(self, degrees: int) -> str:
        self.calls += 1
        self.degrees += degrees
        return f"The room has {self.degrees} degrees."
