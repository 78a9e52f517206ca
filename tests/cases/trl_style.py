"""Environments and reward functions in the style of TRL's users (TRL docs: GRPO trainer, "Environments").

Written for these tests: each has the members, signatures and habits of one kind of environment in TRL's documentation
and examples, and like those imports nothing of this project.
"""

import random
from typing import Any


class Increment:
    """Chooses its own task; `reset` returns the prompt; scores itself."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Raise the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Raise the counter.

        Args:
            step: How much to add to it.

        Returns:
            The new value.
        """
        self.counter += step
        return self.counter


class IncrementTo(Increment):
    """Takes its task from the row."""

    def reset(self, target, **kwargs) -> None:
        self.counter = 0
        self.target = target


class Slide:
    """A board game in nested lists, changed in place; ends by raising; the reward is an attribute."""

    def reset(self, **kwargs) -> str:
        self.board = [[2, 2, 0], [0, 4, 4]]
        self.score = 0.0
        self.done = False
        return self._render()

    def move(self, direction: str) -> str:
        """
        Slide all tiles.

        Args:
            direction: One of "left", "right".

        Returns:
            The board after the move.
        """
        if self.done:
            raise ValueError("Game over.")
        for row in self.board:
            tiles = [tile for tile in row if tile]
            if len(tiles) == 2 and tiles[0] == tiles[1]:
                tiles = [sum(tiles)]
                self.score += tiles[0]
            rest = [0] * (len(row) - len(tiles))
            row[:] = tiles + rest if direction == "left" else rest + tiles
        self.done = self.score >= 12
        return self._render()

    def _render(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.board)


def from_score(environments, **kwargs):
    return [env.score for env in environments]


class Client:
    """A client that environments keep open, captured from the enclosing scope."""

    words: list[str] = []  # noqa: RUF012  (as such classes are written)

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.history = ""

    def restart(self) -> str:
        self.history = "Guess a word of five letters."
        return self.history

    def step(self, word: str, secret: str) -> tuple[str, float, bool]:
        marks = "".join("G" if a == b else "Y" if a in secret else "X" for a, b in zip(word, secret, strict=False))
        self.history += f"\n{word} {marks}"
        return self.history, float(word == secret), word == secret


URL = "http://nowhere.invalid"


class Words:
    """A client in `__init__`, feedback that grows, a game that ends by an exception, the reward in an attribute."""

    def __init__(self):
        self.client = Client(base_url=URL)

    def reset(self, secret: str = "crane", **kwargs) -> str | None:
        self._secret = secret
        self._seen = self.client.restart()
        self.reward = 0.0
        self.done = False
        return self._seen

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: Five letters.

        Returns:
            What is right about it.
        """
        if self.done:
            raise ValueError("Game over.")
        history, self.reward, self.done = self.client.step(word, self._secret)
        news, self._seen = history[len(self._seen) :], history
        return news


def from_reward(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


class Coding:
    def reset(self, **kwargs) -> str:
        return "Compute 6 * 7."

    def run_code(self, code: str) -> str:
        """Run Python code and return what it printed.

        Args:
            code: The source.

        Returns:
            What it printed.
        """
        self.output = str(eval(code))
        return self.output


class Shouting:
    """An environment whose methods are all async."""

    async def reset(self, **kwargs) -> str:
        self._loud = False
        return "Shout."

    async def shout(self, text: str) -> str:
        """Shout a text.

        Args:
            text: What to shout.

        Returns:
            The text, loud.
        """
        self._loud = True
        return text.upper()

    async def get_reward(self) -> float:
        return 1.0 if self._loud else 0.0


def by_kind(environments, **kwargs):
    """Branches on the environment's class; returns None for rows of other classes."""
    return [float(env.output == "42") if isinstance(env, Coding) else None for env in environments]


async def by_target(prompts, completions, completion_ids, environments, target, **kwargs):
    scored = zip(environments, target, completions, completion_ids, strict=True)
    return [float(env.counter == goal and bool(text) and bool(ids)) for env, goal, text, ids in scored]


def has_answer(completions, **kwargs) -> list[float]:
    return [float("Answer:" in _said(completion)) for completion in completions]


def _said(completion: Any) -> str:
    return completion if isinstance(completion, str) else (completion[-1]["content"] or "")
