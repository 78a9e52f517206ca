"""Rewards of a batch as an estimator compares them: overlong penalty, clip, normalization, in that order.

What holds for a completion's reward holds for everything in its unit: the reward of the greedy completion (`remax`) and
the reward still to come at each turn.
"""

from functools import cached_property

import torch
from torch import Tensor

from workers.settings import Normalization, Settings
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.masks import TRUNCATION_REASONS, Masks
from workers.train.algorithms.normalization import center_and_divisor
from workers.train.algorithms.shaping import clip_rewards, overlong_penalty
from workers.train.step.batch import Batch


class ShapedRewards:
    """Shaped rewards, each computed on first use.

    Args:
        batch: the batch.
        masks: its final masks.
        settings: of the run.
    """

    def __init__(self, batch: Batch, masks: Masks, settings: Settings) -> None:
        self._batch, self._masks, self._settings = batch, masks, settings
        self._normalization = Normalization.from_levels(settings.algorithm.reward_normalization)

    @cached_property
    def groups(self) -> Grouping:
        """The groups of the completions; their valid members are B."""
        facts = self._batch.facts
        return Grouping(facts.group_ids_C, self._masks.baseline_C, facts.num_groups)

    @cached_property
    def penalized_C(self) -> Tensor:
        """float64: rewards with the overlong penalty, in the unit in which they were measured; 0 outside B."""
        batch, masks = self._batch, self._masks
        if not self._settings.algorithm.overlong_penalty[0]:
            return masks.rewards_C  # counting tokens would cost more than all other shaping
        lengths_C = torch.zeros_like(batch.facts.group_ids_C).index_add(
            0, batch.completion_ids_R, batch.sampled_RT.sum(dim=1)
        )
        penalized_C = masks.rewards_C + self._penalty(lengths_C, masks.penalised_C)
        return torch.where(masks.baseline_C, penalized_C, 0.0)

    @cached_property
    def rewards_C(self) -> Tensor:
        """float64: rewards as the estimator compares them; 0 outside B."""
        centred_C, divisor_C = self._centred_and_divisor
        return centred_C / divisor_C

    def returns(self, to_go_CT: Tensor) -> Tensor:
        """Shape the reward still to come at each token like the reward of the whole completion.

        A return is clipped and normalized as a total of the same size would be; at a completion's
        first token it is the completion's shaped reward. If the compared rewards are all equal, returns are 0.

        Args:
            to_go_CT: `penalized_C` at the first token, minus the rewards of the turns before each later one.
        """
        # The difference from the completion's own total keeps the mean of each completion's pool out of it.
        change_CT = self._clip(to_go_CT, torch.ones_like(to_go_CT, dtype=torch.bool)) - self.clipped_C.unsqueeze(1)
        divisor_C = self._centred_and_divisor[1]
        if self._normalization.std == "none":
            factor_C = torch.ones_like(divisor_C)
        else:
            factor_C = torch.where(divisor_C > self._normalization.epsilon, 1 / divisor_C, 0.0)
        return self.rewards_C.unsqueeze(1) + change_CT * factor_C.unsqueeze(1)

    @property
    def greedy_G(self) -> Tensor:
        """float64: the greedy completion's reward, shaped like those of its group; 0 where it is no baseline."""
        batch = self._batch
        rewards_G, usable_G = greedy_baseline(batch, self._settings)
        penalised_G = _has_policy(batch.greedy_truncated_G, self._settings, "penalty")
        return self._clip(rewards_G + self._penalty(batch.greedy_lengths_G, penalised_G), usable_G)

    @cached_property
    def clipped_C(self) -> Tensor:
        """float64: the same, clipped and not normalized."""
        return self._clip(self.penalized_C, self._masks.baseline_C)

    @cached_property
    def _centred_and_divisor(self) -> tuple[Tensor, Tensor]:
        normalization = self._normalization
        return center_and_divisor(
            self.clipped_C,
            self.groups,
            self._masks.loss_C,
            mean=normalization.mean,
            std=normalization.std,
            leave_one_out=normalization.leave_one_out,
            unbiased=normalization.unbiased,
            epsilon=normalization.epsilon,
        )

    def _penalty(self, lengths: Tensor, penalised: Tensor) -> Tensor:
        tail, factor = self._settings.algorithm.overlong_penalty
        if not tail:
            return torch.zeros_like(lengths, dtype=torch.float64)
        return overlong_penalty(
            lengths, penalised, max_length=self._settings.rollout.max_tokens, tail=tail, factor=factor
        )

    def _clip(self, rewards: Tensor, known: Tensor) -> Tensor:
        clipped: Tensor = clip_rewards(rewards, known, limit=self._settings.algorithm.reward_clip)
        return clipped


def greedy_baseline(batch: Batch, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return each group's greedy reward under the truncation policy, and whether it can serve as a baseline.

    Returns:
        float64 (G), 0 where it cannot, and bool (G).
    """
    usable_G = batch.greedy_measured_G & ~_has_policy(batch.greedy_truncated_G, settings, "exclude")
    zeroed_G = _has_policy(batch.greedy_truncated_G, settings, "zero_reward_in_baseline")
    return torch.where(usable_G & ~zeroed_G, batch.greedy_rewards_G, 0.0), usable_G


def _has_policy(truncated_G: Tensor, settings: Settings, policy: str) -> Tensor:
    """Return where a completion was truncated for a reason with this policy."""
    table = [settings.truncation_policy(reason) == policy for reason in TRUNCATION_REASONS]
    # Index -1, the code of "not truncated", reads the last entry.
    return torch.tensor([*table, False], device=truncated_G.device)[truncated_G]
