"""Reward parts read from records: parts by name and weight, rewards per turn, and the greedy completion."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from msgspec import structs
from torch import Tensor

from stream.errors import RecordError
from stream.records import Completion, Group
from stream.validity import MAX_REWARD, Measured, Reward, RewardReason, Unmeasured

PartKey = tuple[str, float]
"""Name and weight of a reward part."""


class PartTable(NamedTuple):
    """The parts of every completion's reward."""

    keys: tuple[PartKey, ...]
    """Name and weight of each part, in order of first appearance."""
    values_PC: Tensor
    """float64, unweighted; 0 where absent or unmeasured. Parts per turn are added up."""
    has_part_PC: Tensor
    """bool: the completion has this part, and it is measured."""

    @property
    def weights_P(self) -> Tensor:
        """float64."""
        return torch.tensor([weight for _, weight in self.keys], dtype=torch.float64, device=self.values_PC.device)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts; a name that occurs again with another weight is `name@weight`."""
        names: list[str] = []
        for name, weight in self.keys:
            names.append(f"{name}@{weight:g}" if name in names else name)
        return tuple(names)

    def select(self, chosen_C: Tensor) -> Self:
        """Return the table of some completions (bool or indices)."""
        return self._replace(values_PC=self.values_PC[:, chosen_C], has_part_PC=self.has_part_PC[:, chosen_C])


def with_bounded_rewards(group: Group) -> Group:
    """Return the group; completions whose reward, part or weighted part exceeds `MAX_REWARD` are unmeasured in it.

    Our scorers check the bound where they measure; the group may come from another one. Its siblings stay readable.
    """
    return structs.replace(group, completions=list(map(_with_bounded_reward, group.completions)))


def _with_bounded_reward(completion: Completion) -> Completion:
    rewards = [(completion.reward, 1.0), *((part.reward, part.weight) for part in completion.parts)]
    values = [(value, weight) for reward, weight in rewards if (value := measured_value(reward)) is not None]
    largest = max((max(abs(value), abs(weight * value)) for value, weight in values), default=0.0)
    if largest <= MAX_REWARD or not isinstance(completion.reward, Measured):
        return completion
    detail = f"a reward of {largest:g}; the limit is {MAX_REWARD:g}"
    return structs.replace(completion, reward=Unmeasured(RewardReason.TOO_LARGE, detail))


def measured_value(reward: Reward | None) -> float | None:
    """Return the value of a reward that is measured and finite, else None."""
    return reward.value if isinstance(reward, Measured) and math.isfinite(reward.value) else None


def greedy_completion(group: Group) -> Completion | None:
    """Return the group's greedy completion, or None.

    Raises:
        RecordError: the group has several, so none of them can be the baseline.
    """
    greedy = [completion for completion in group.completions if completion.greedy]
    if len(greedy) > 1:
        raise RecordError(f"group {group.prompt.id}: {len(greedy)} greedy completions; one at most expected")
    return greedy[0] if greedy else None


def part_table(completions: Sequence[Completion]) -> PartTable:
    """Tabulate reward parts by name and weight, in order of first appearance.

    A completion's parts of one name and weight, such as those of its turns, are added up. The same name with another
    weight (from a run that was resumed with other settings) is a part of its own, so the weighted sum over parts equals
    each completion's reward.
    """
    rows: dict[PartKey, int] = {}
    sums: defaultdict[tuple[int, int], float] = defaultdict(float)
    for column, completion in enumerate(completions):
        for part in completion.parts:
            row = rows.setdefault((part.name, part.weight), len(rows))
            value = measured_value(part.reward)
            if value is not None:
                sums[row, column] += value
    values_PC = torch.zeros(len(rows), len(completions), dtype=torch.float64)
    at = torch.tensor(list(sums), dtype=torch.int64).view(-1, 2)
    values_PC[at[:, 0], at[:, 1]] = torch.tensor(list(sums.values()), dtype=torch.float64)
    has_part_PC = torch.zeros(values_PC.shape, dtype=torch.bool)
    has_part_PC[at[:, 0], at[:, 1]] = True
    return PartTable(tuple(rows), values_PC, has_part_PC)


def merge_tables(tables: Sequence[PartTable]) -> PartTable:
    """Return the table of all their completions, in order."""
    keys = tuple(dict.fromkeys(key for table in tables for key in table.keys))
    counts = [table.values_PC.shape[1] for table in tables]
    values_PC = torch.zeros(len(keys), sum(counts), dtype=torch.float64)
    has_part_PC = torch.zeros(values_PC.shape, dtype=torch.bool)
    for table, end, count in zip(tables, accumulate(counts), counts, strict=True):
        for part, key in enumerate(table.keys):
            row = keys.index(key)
            values_PC[row, end - count : end] = table.values_PC[part]
            has_part_PC[row, end - count : end] = table.has_part_PC[part]
    return PartTable(keys, values_PC, has_part_PC)


def turn_rewards(
    completions: Sequence[tuple[str, Completion]], last_tokens: Sequence[Sequence[int]], shape: tuple[int, int]
) -> Tensor:
    """Put each turn's reward on the last token sampled in it.

    Args:
        completions: each with its prompt's id.
        last_tokens: flat index among the rows of the last token of each sampled range, per completion, in order.
        shape: number of rows and their width.

    Returns:
        float64 (R, T); zeros for completions whose reward is not measured, even if some of their turns are.

    Raises:
        RecordError: a completion has rewards per turn, but not one per sampled range.
    """
    positions: list[int] = []
    rewards: list[float] = []
    for (prompt, completion), last in zip(completions, last_tokens, strict=True):
        try:
            by_range = _by_range(completion, len(last))
        except ValueError as error:
            raise RecordError(f"group {prompt}, completion {completion.index}: {error}") from error
        if by_range and measured_value(completion.reward) is not None:
            positions += last
            rewards += by_range
    rewards_N = torch.zeros(shape[0] * shape[1], dtype=torch.float64)
    rewards_N[torch.tensor(positions, dtype=torch.int64)] = torch.tensor(rewards, dtype=torch.float64)
    return rewards_N.view(shape)


def _by_range(completion: Completion, ranges: int) -> list[float]:
    """Return the weighted reward of each sampled range; empty without rewards per turn.

    Range k is turn k. An engine may end a turn without a token, which ends the episode: such a last turn has no range,
    and its reward goes to the previous one.
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
    """Return the weighted reward of each turn of the model, 0.0 where unmeasured."""
    found: defaultdict[int, float] = defaultdict(float)
    for part in completion.parts:
        if part.turn is not None:
            found[part.turn] += part.weight * (measured_value(part.reward) or 0.0)
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"it has rewards of turns {sorted(found)}, and none of those between")
    return [found[turn] for turn in range(len(found))]
