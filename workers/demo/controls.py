"""Controls for the demo: runs that must not learn, so that learning in the real one means something."""

import random
import zlib
from typing import Any

from envs.builtin.calculator import exact_answer
from stream.validity import Reward


def permuted_answer(
    prompts: list[Any], completions: list[Any], environments: list[Any], answer: list[Any]
) -> list[float | Reward]:
    """The demo's reward, handed to the wrong siblings: a permutation within the group, fixed by its content."""
    rewards = list(exact_answer(completions=completions, environments=environments, answer=answer))
    random.Random(zlib.crc32(repr((prompts[0], completions)).encode())).shuffle(rewards)
    return rewards
