"""Rewards of negative controls: demo runs that must not learn, as evidence that the real run does."""

import random
import zlib
from typing import Any

from envs.builtin.calculator import exact_answer
from stream.validity import Reward


def permuted_answer(
    prompts: list[Any], completions: list[Any], environments: list[Any], answer: list[Any]
) -> list[float | Reward]:
    """Return the demo's rewards, permuted within the group; the group's content determines the permutation."""
    rewards = list(exact_answer(completions=completions, environments=environments, answer=answer))
    random.Random(zlib.crc32(repr((prompts[0], completions)).encode())).shuffle(rewards)
    return rewards
