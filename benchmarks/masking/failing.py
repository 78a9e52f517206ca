"""The demo's reward, failing for a fifth of the completions: by raising, or by returning 0.0.

Used in a run's settings as `benchmarks/masking/failing.py:...`. Failures depend only on the run's seed, the prompt's id
and the completion's index, so runs with the same seed fail in the same places.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from envs.builtin.calculator import Calculator, exact_answer
from stream.validity import Reward

SHARE = 0.2
"""Of all completions."""


class NumberedCalculator(Calculator):
    """A calculator that stores its completion's index for the reward function."""

    def reset(self, problem: str = "", answer: Any = None, completion_index: int = 0, **fields: Any) -> None:
        """Start a problem as completion number `completion_index` of its group."""
        super().reset(problem, answer, **fields)
        self.completion_index = completion_index


def fails(run_seed: int, prompt_id: str, completion_index: int) -> bool:
    """Return whether the reward of a completion fails: decided by a hash, for `SHARE` of them."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{completion_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < SHARE * 2**64


def raising(run_seed: list[int], prompt_id: list[str], environments: list[Any], **batch: Any) -> list[float | Reward]:
    """Exact answer; raises for failing completions, which are then masked.

    A function that raises for a group is called again for each completion, so only failing ones are invalid.
    """
    if any(_failing(run_seed, prompt_id, environments)):
        raise RuntimeError("the reward fails here")
    return exact_answer(environments=environments, **batch)


def scoring_zero(
    run_seed: list[int], prompt_id: list[str], environments: list[Any], **batch: Any
) -> list[float | Reward]:
    """Exact answer; returns 0.0 for failing completions, as if the model were wrong."""
    failing = _failing(run_seed, prompt_id, environments)
    rewards = exact_answer(environments=environments, **batch)
    return [0.0 if failed else reward for failed, reward in zip(failing, rewards, strict=True)]


def _failing(run_seed: Sequence[int], prompt_id: Sequence[str], environments: Sequence[Any]) -> list[bool]:
    indices = [environment.completion_index for environment in environments]
    return [fails(*row) for row in zip(run_seed, prompt_id, indices, strict=True)]
