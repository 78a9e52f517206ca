"""What rewards are made of, read from records: parts by name, turns in order, and the greedy completion's reward."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stream.errors import RecordError
from stream.records import Completion, Group
from stream.validity import Measured, Reward


class PartTable(NamedTuple):
    """The parts of every completion's reward: `names` (P), `values_PC` and `weights_P`, float64."""

    names: tuple[str, ...]
    values_PC: Tensor
    weights_P: Tensor


def measured_value(reward: Reward | None) -> float | None:
    """The number, if somebody measured a finite one."""
    return reward.value if isinstance(reward, Measured) and math.isfinite(reward.value) else None


def greedy_completion(group: Group) -> Completion | None:
    """The group's greedy completion, if it has one.

    Raises:
        RecordError: it has several, and none of them is the baseline.
    """
    found = [completion for completion in group.completions if completion.greedy]
    if len(found) > 1:
        raise RecordError(f"group {group.prompt.id}: {len(found)} greedy completions; one at most expected")
    return found[0] if found else None


def part_table(completions: Sequence[Completion]) -> PartTable:
    """Parts by name, in the order in which they first appear.

    A completion's parts of one name, those of its turns for one, are added up. The same name under another weight
    (which a run resumed with other settings may hold) is a part of its own, called `name@weight`: so the weighted sum
    over parts is each completion's reward.

    Args:
        completions: whose parts to read.

    Returns:
        Unweighted values, 0 where a completion has no such part or nobody measured it.
    """
    places: dict[tuple[str, float], int] = {}
    names: list[str] = []
    sums: defaultdict[tuple[int, int], float] = defaultdict(float)
    for column, completion in enumerate(completions):
        for part in completion.parts:
            place = places.setdefault((part.name, part.weight), len(names))
            if place == len(names):
                names.append(f"{part.name}@{part.weight:g}" if part.name in names else part.name)
            sums[place, column] += measured_value(part.reward) or 0.0
    values_PC = torch.zeros(len(names), len(completions), dtype=torch.float64)
    at = torch.tensor(list(sums), dtype=torch.int64).view(-1, 2)
    values_PC[at[:, 0], at[:, 1]] = torch.tensor(list(sums.values()), dtype=torch.float64)
    weights = [weight for _, weight in places]
    return PartTable(tuple(names), values_PC, torch.tensor(weights, dtype=torch.float64))


def turn_rewards(
    completions: Sequence[tuple[str, Completion]], last_tokens: Sequence[Sequence[int]], shape: tuple[int, int]
) -> Tensor:
    """Put each turn's reward on the last token sampled in it.

    Args:
        completions: each with its prompt's id.
        last_tokens: the last token of every sampled range of each completion, in order, as a place in the
            flattened rows.
        shape: rows and their width.

    Returns:
        float64 (R, T); zeros for completions whose reward is not measured, whichever of their turns are.

    Raises:
        RecordError: a completion has rewards by turn, but not one for each sampled range.
    """
    places: list[int] = []
    rewards: list[float] = []
    for (prompt, completion), found in zip(completions, last_tokens, strict=True):
        try:
            of_turns = _by_range(completion, len(found))
        except ValueError as error:
            raise RecordError(f"group {prompt}, completion {completion.index}: {error}") from error
        if of_turns and measured_value(completion.reward) is not None:
            places += found
            rewards += of_turns
    rewards_N = torch.zeros(shape[0] * shape[1], dtype=torch.float64)
    rewards_N[torch.tensor(places, dtype=torch.int64)] = torch.tensor(rewards, dtype=torch.float64)
    return rewards_N.view(shape)


def _by_range(completion: Completion, ranges: int) -> list[float]:
    """The weighted reward of each sampled range; empty where none came by turn.

    The k-th range is turn k. An engine may end a turn without a token: that ends the episode, so such a turn is the
    last one and has no range, and its reward goes to the range before.
    """
    rewards = _by_turn(completion)
    if len(rewards) == ranges + 1 == completion.turns:
        last = rewards.pop()
        if rewards:
            rewards[-1] += last
    if rewards and len(rewards) != ranges:
        raise ValueError(f"{len(rewards)} rewards of turns, but {ranges} sampled ranges")
    return rewards


def _by_turn(completion: Completion) -> list[float]:
    """The weighted reward of each turn of the model, 0.0 where nobody measured it."""
    found: defaultdict[int, float] = defaultdict(float)
    for part in completion.parts:
        if part.turn is not None:
            found[part.turn] += part.weight * (measured_value(part.reward) or 0.0)
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"it has rewards of turns {sorted(found)}, and none of those between")
    return [found[turn] for turn in range(len(found))]
