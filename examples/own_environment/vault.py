"""An environment of one's own. Nothing is imported from Penstock, nothing subclassed."""


class Vault:
    """A vault with a dial: turn it to the number on the note."""

    def reset(self, number: int, **row) -> str:
        """Begin an episode with the fields of the prompt's row."""
        self.number = number
        self.dial = 0
        return f"The note says {number}."

    def turn(self, by: int) -> int:
        """Turn the dial.

        Args:
            by: Clicks; negative ones turn it to the left.
        """
        self.dial += by
        return self.dial

    def get_reward(self) -> float:
        """What the episode was worth."""
        return float(self.dial == self.number)


def brevity(completions, environments, **columns) -> list[float]:
    """A reward function: fewer turns are better, among those that open the vault."""
    turns = [sum(message["role"] == "assistant" for message in completion) for completion in completions]
    return [1.0 / n if env.dial == env.number else 0.0 for n, env in zip(turns, environments, strict=True)]
