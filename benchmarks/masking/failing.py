"""The demo's reward, failing for a fifth of the completions: by raising, or by saying 0.0.

Named by a run's settings as `benchmarks/masking/failing.py:...`. Which completions fail is a fact of the run's seed,
the prompt's id and the completion's index, so that two runs of one seed fail in the same places, whatever was said.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from envs.builtin.calculator import Calculator, exact_answer
from stream.validity import Reward

SHARE = 0.2
"""Of all completions."""


class NumberedCalculator(Calculator):
    """A calculator that remembers which completion it belongs to, for the reward to read."""

    def reset(self, problem: str = "", answer: Any = None, completion_index: int = 0, **fields: Any) -> None:
        """Begin a problem, as completion number `completion_index` of its group."""
        super().reset(problem, answer, **fields)
        self.completion_index = completion_index


def fails(run_seed: int, prompt_id: str, completion_index: int) -> bool:
    """Whether the reward of this completion fails: by a hash, for `SHARE` of them."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{completion_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < SHARE * 2**64


def raising(run_seed: list[int], prompt_id: list[str], environments: list[Any], **batch: Any) -> list[float | Reward]:
    """The exact answer; raises where the reward fails, so that those completions are masked.

    A function that raises for a group is called again row by row: only the rows that fail are invalid.
    """
    if any(_failing(run_seed, prompt_id, environments)):
        raise RuntimeError("the reward fails here")
    return exact_answer(environments=environments, **batch)


def scoring_zero(
    run_seed: list[int], prompt_id: list[str], environments: list[Any], **batch: Any
) -> list[float | Reward]:
    """The exact answer; 0.0 where the reward fails, as if the model had been wrong."""
    failing = _failing(run_seed, prompt_id, environments)
    rewards = exact_answer(environments=environments, **batch)
    return [0.0 if failed else reward for failed, reward in zip(failing, rewards, strict=True)]


def _failing(run_seed: Sequence[int], prompt_id: Sequence[str], environments: Sequence[Any]) -> list[bool]:
    indices = [environment.completion_index for environment in environments]
    return [fails(*row) for row in zip(run_seed, prompt_id, indices, strict=True)]
