"""Tasks of reasoning-gym (Apache-2.0) for a small language model: some solved problems, then the problem itself.

A model of 135 million parameters rarely answers in a form that it is only told about. It continues a form that it
has seen: the solved problems show it, and the whole answer counts.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import reasoning_gym

SOLVED = 1_000_003
"""Seed of the first solved problem. All prompts show the same, so a batch forwards their tokens once."""


class Solved:
    """A problem of a data set, after others that are solved.

    Its scorer runs in the worker itself: name a data set whose scorer only compares texts or numbers. The environment
    `reasoning_gym` that Penstock ships runs any of them in a sandbox.

    Args:
        dataset: name of the data set.
        config: its options, such as `max_terms`.
        solved: number of solved problems.
    """

    def __init__(self, dataset: str, config: Mapping[str, Any] = MappingProxyType({}), solved: int = 4) -> None:
        self._dataset, self._config = dataset, dict(config)
        self._solved: list[dict[str, str]] = []
        for number in range(solved):
            _, problem = self._make(SOLVED + number)
            self._solved.append({"role": "user", "content": problem["question"].strip()})
            self._solved.append({"role": "assistant", "content": str(problem["answer"])})
        self.question, self.answer = "", ""

    def reset(self, seed: int) -> list[dict[str, str]]:
        """Make the problem; all completions of a group have the same one."""
        self._scorer, self._problem = self._make(seed)
        self.question, self.answer = self._problem["question"].strip(), str(self._problem["answer"])
        return [*self._solved, {"role": "user", "content": self.question}]

    def get_reward(self, messages: list[dict[str, Any]]) -> float:
        """Return the data set's own score: 1 for the right answer, less for a text that contains it.

        Some scorers raise on a text that is no number. That is a wrong answer, and no failure of this environment.
        """
        try:
            return float(self._scorer.score_answer(messages[-1]["content"].strip(), self._problem))
        except ValueError:
            return 0.0

    def _make(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return a data set with one problem, and the problem."""
        scorer = reasoning_gym.create_dataset(self._dataset, seed=seed, size=1, **self._config)
        return scorer, scorer[0]
