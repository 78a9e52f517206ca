"""Groups as tensors: what a training step works on.

Rows are right-padded. Rows point to their completion and group by code, so a completion without a row (its rollout
failed before sampling) counts like any other. A greedy completion is not part of the batch; its reward is a fact of its
group. `collation` builds batches.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from workers.train.algorithms.masks import CompletionFacts
from workers.train.step.reward_parts import PartKey, PartTable


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """Rows, and the completions and groups that they belong to.

    Example, one group of two completions, the second without a row; the first got 0.5 for its first turn, and 2 from a
    reward function of weight 0.5::

        tokens_RT              [[p p a a t a]]          p prompt, a sampled, t from the tool
        sampled_RT             [[. . x x . x]]
        rollout_logprobs_RT    [[0 0 -1 -2 0 -.5]]
        versions_RT            [[-1 -1 7 7 -1 8]]
        lengths_R              [6]
        completion_ids_R       [0]
        facts.group_ids_C      [0, 0]
        part_names             ("env", "style")
        parts_PC               [[.5 0] [2 0]]
        part_weights_P         [1 .5]
        turn_rewards_RT        [[0 0 0 .5 0 0]]
    """

    tokens_RT: Tensor
    """int64, prompt and completion; 0 in padding."""
    sampled_RT: Tensor
    """bool, tokens that the policy sampled."""
    rollout_logprobs_RT: Tensor
    """float32, the engine's log-probs of sampled tokens; 0 elsewhere."""
    versions_RT: Tensor
    """int32, the policy version that sampled each token; -1 elsewhere."""
    lengths_R: Tensor
    """int64, tokens of each row without padding."""
    completion_ids_R: Tensor
    """int64, the completion that each row belongs to; rows of one completion share it."""
    facts: CompletionFacts
    """Of the completions."""
    prompt_ids: tuple[str, ...]
    """Of the groups."""
    greedy_rewards_G: Tensor
    """float64, reward of the group's greedy completion; 0 unless `greedy_measured_G`."""
    greedy_measured_G: Tensor
    """bool: the group has a greedy completion, its rollout did not fail, and its reward is finite."""
    greedy_lengths_G: Tensor
    """int64, sampled tokens of the greedy completion."""
    greedy_truncated_G: Tensor
    """int64, why the greedy completion was truncated: code into `TRUNCATION_REASONS`, or `NONE`."""
    part_keys: tuple[PartKey, ...]
    """Name and weight of each part of the rewards, in order of first appearance."""
    parts_PC: Tensor
    """float64, unweighted value of each part; 0 where absent or unmeasured. Parts per turn are added up."""
    has_part_PC: Tensor
    """bool: the completion has this part, and it is measured."""
    part_weights_P: Tensor
    """float64."""
    turn_rewards_RT: Tensor
    """float64, weighted reward of each turn on the last token sampled in it; 0 elsewhere, and 0 for completions whose
    reward is not measured."""

    @property
    def group_ids_R(self) -> Tensor:
        """int64, the group that each row belongs to."""
        return self.facts.group_ids_C[self.completion_ids_R]

    @property
    def parts(self) -> PartTable:
        """The parts of the rewards."""
        return PartTable(self.part_keys, self.parts_PC, self.has_part_PC)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts; a name that occurs again with another weight is `name@weight`."""
        return self.parts.names

    def to(self, device: torch.device, logprobs: torch.dtype = torch.float32) -> Self:
        """Return the batch on another device, with its log-probs in the dtype of the model's."""
        moved: Self = replace(_to_device(self, device), facts=_to_device(self.facts, device))
        return replace(moved, rollout_logprobs_RT=moved.rollout_logprobs_RT.to(logprobs))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardStatistics:
    """Results of a pass without gradient over the tokens that may bear loss, under the old policy; 0 elsewhere."""

    old_logprobs_RT: Tensor
    sum_pi_squared_RT: Tensor
    """Sum of squared probabilities of the distribution that each token was drawn from."""
    values_RT: Tensor
    """The critic's value of the state before each token; 0 without a critic."""
    end_values_R: Tensor
    """The critic's value of the state after the last token of each row."""


def _to_device(record: Any, device: torch.device) -> Any:
    """Return a dataclass with its tensors on another device."""
    tensors = {f.name: getattr(record, f.name) for f in fields(record) if isinstance(getattr(record, f.name), Tensor)}
    return replace(record, **{name: tensor.to(device) for name, tensor in tensors.items()})
