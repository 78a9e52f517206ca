"""Completions and groups as workers make them."""

import random
from collections.abc import Sequence

from stream.records import Completion, Group, Prompt
from stream.validity import Measured, Unmeasured
from tests.cases.rows import episode_row


def completion(
    index: int,
    reward: float | Measured | Unmeasured | None = None,
    tokens: Sequence[int] = (3, 4),
    *,
    version: int = 0,
    logprobs: Sequence[float] = (-1.0,),
    **facts: object,
) -> Completion:
    """Return a completion of one row; its turns are the runs of sampled tokens.

    Args:
        index: within its group.
        reward: a number stands for a measured reward.
        tokens: ids; 0 stands for a token of a tool's answer, which was not sampled.
        version: of the policy that sampled all of them.
        logprobs: of the sampled tokens, repeated as often as needed.
        facts: other fields of the record.
    """
    row = episode_row(tokens, logprobs, version=version)
    known = Measured(float(reward)) if isinstance(reward, int | float) else reward
    return Completion(index=index, rows=[row], reward=known, **({"turns": len(row.sampled_ranges)} | facts))


def group(*completions: Completion, name: str = "p") -> Group:
    """Return a group of these completions."""
    return Group(prompt=Prompt(id=name, messages=[]), completions=list(completions))


def random_group(number: int, version: int, *, vocabulary: int, rewards: Sequence[float]) -> Group:
    """Return a group of completions of different lengths, always the same one for a number."""
    chance = random.Random(number)
    completions = []
    for index, reward in enumerate(rewards):
        tokens = [chance.randrange(1, vocabulary) for _ in range(chance.randrange(2, 12))]
        logprobs = [chance.uniform(-4.5, -3) for _ in tokens]
        completions.append(completion(index, reward, tokens, version=version, logprobs=logprobs))
    return group(*completions, name=f"prompts:0:{number}")
