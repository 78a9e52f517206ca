"""Advantages of a batch under a run's settings: shape the rewards, estimate from them, put the result on tokens.

Rewards are shaped by the overlong penalty, the clip and the normalization, in that order. What holds for a completion's
reward holds for everything in its unit: the reward of the greedy completion (`remax`) and the reward still to come at
each turn.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from msgspec import structs
from torch import Tensor

from workers.settings import Normalization, Settings
from workers.train.algorithms.advantages import ESTIMATORS, TokenAdvantages, estimate
from workers.train.algorithms.completion_layout import CompletionLayout
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.masks import NONE, TRUNCATION_REASONS, Masks, only_baseline
from workers.train.algorithms.normalization import center_and_divisor, normalize_tokens
from workers.train.algorithms.shaping import at_zero_reward, clip_rewards, overlong_penalty
from workers.train.step.batch import Batch, ForwardStatistics

FROM_FORWARD_STATISTICS = ("values_CT", "bootstrap_C", "old_logprobs_CT", "sum_pi_squared_CT")
"""Estimator inputs that need a pass of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """Advantages of a batch, per completion and per token."""

    values_C: Tensor
    """float64, one per completion; the mean over its loss tokens if tokens have their own."""
    tokens_RT: Tensor
    """On the rows' tokens; an expanded view if all tokens of a completion share one."""
    returns_RT: Tensor | None = None
    """Targets of a critic; None if the estimator has none."""


def estimate_advantages(
    batch: Batch,
    masks: Masks,
    settings: Settings,
    *,
    statistics: ForwardStatistics | None = None,
    weights_RT: Tensor | None = None,
) -> Advantages:
    """Estimate advantages with the estimator and normalizers that the settings name.

    Args:
        batch: the batch.
        masks: its final masks.
        settings: of the run.
        statistics: for estimators that need log-probs or values.
        weights_RT: importance weights, for estimators that need them; 1 by default.
    """
    outside_C, masks = masks.outside_C, only_baseline(masks, batch.completion_ids_R)
    inputs = _EstimatorInputs(batch, masks, settings, statistics, weights_RT)
    name = settings.estimator.name
    needed = {need: getattr(inputs, need) for need in ESTIMATORS[name].input_names}
    # The single-sample policy `raw` returns the shaped reward, whatever the estimator compares.
    needed |= {"rewards_C": inputs.rewards_C, "groups": inputs.groups}
    estimated = estimate(
        name, needed, settings.estimator.options, single_sample_policy=settings.algorithm.single_sample_policy
    )
    ids_R, values_C = batch.completion_ids_R, None
    if isinstance(estimated, TokenAdvantages):
        tokens_RT = inputs.layout.to_rows(estimated.advantages_CT)
        returns_RT = inputs.layout.to_rows(estimated.returns_CT)
    else:
        values_C = estimated
        tokens_RT = values_C[ids_R].unsqueeze(1).expand(masks.loss_tokens_RT.shape)
        returns_RT = None
    normalization = Normalization.from_levels(settings.algorithm.advantage_normalization)
    if normalization != Normalization():
        values_C = None
        options = structs.asdict(normalization)
        tokens_RT = normalize_tokens(tokens_RT, masks.loss_tokens_RT, batch.group_ids_R, **options)
    if values_C is None:
        values_C = _mean_over_tokens(tokens_RT, masks.loss_tokens_RT, ids_R, len(masks.loss_C))
    if bool(outside_C.any()):
        values_C = at_zero_reward(
            values_C, inputs.clipped_C, inputs.groups, outside_C, bounded=settings.divides_by_group_std
        )
        of_rows_R1 = values_C[ids_R].unsqueeze(1)
        tokens_RT = torch.where(outside_C[ids_R].unsqueeze(1), of_rows_R1.to(tokens_RT.dtype), tokens_RT)
    return Advantages(values_C, tokens_RT, returns_RT)


class _EstimatorInputs:
    """Inputs that an estimator may ask for, each computed on first use; named as in `ESTIMATORS.inputs`."""

    def __init__(
        self,
        batch: Batch,
        masks: Masks,
        settings: Settings,
        statistics: ForwardStatistics | None,
        weights_RT: Tensor | None,
    ) -> None:
        self._batch, self._masks, self._settings = batch, masks, settings
        self._statistics, self._weights_RT = statistics, weights_RT
        self._shaped = ShapedRewards(batch, masks, settings)

    @property
    def groups(self) -> Grouping:
        return self._shaped.groups

    @property
    def rewards_C(self) -> Tensor:
        return self._shaped.rewards_C

    @property
    def clipped_C(self) -> Tensor:
        return self._shaped.clipped_C

    @cached_property
    def lengths_C(self) -> Tensor:
        return self._count(self._masks.baseline_tokens_RT)

    @cached_property
    def loss_lengths_C(self) -> Tensor:
        return self._count(self._masks.loss_tokens_RT)

    @property
    def parts_PC(self) -> Tensor:
        return self._batch.parts_PC

    @property
    def has_part_PC(self) -> Tensor:
        return self._batch.has_part_PC

    @property
    def part_weights_P(self) -> Tensor:
        return self._batch.part_weights_P

    @property
    def correct_C(self) -> Tensor:
        return self._masks.baseline_C & (self._masks.rewards_C >= self._settings.algorithm.success_threshold)

    @cached_property
    def layout(self) -> CompletionLayout:
        batch, mask_RT = self._batch, self._masks.loss_tokens_RT
        return CompletionLayout(batch.completion_ids_R, len(self._masks.loss_C), mask_RT, batch.sampled_RT)

    @property
    def mask_CT(self) -> Tensor:
        return self.layout.mask_CT

    @cached_property
    def token_rewards_CT(self) -> Tensor:
        """Each turn's reward on that turn's last token, and the rest of the reward on the completion's last token.

        The sum from each token on is shaped like a completion's reward (`ShapedRewards.returns`), so that turns and
        totals have one unit.
        """
        masks, ids_R, layout = self._masks, self._batch.completion_ids_R, self.layout
        rewarded_R = (masks.loss_C & ~masks.zeroed_C)[ids_R]
        turns_RT = torch.where(masks.loss_tokens_RT & rewarded_R.unsqueeze(1), self._batch.turn_rewards_RT, 0.0)
        if not turns_RT.any():
            return layout.on_last_token(torch.where(masks.loss_C, self.rewards_C, 0.0))
        turns_C = self.rewards_C.new_zeros(len(masks.loss_C)).index_add(0, ids_R, turns_RT.sum(dim=1))
        rest_C = torch.where(masks.loss_C, self._shaped.penalized_C, 0.0) - turns_C
        measured_CT = layout.to_dense(turns_RT) + layout.on_last_token(rest_C)
        returns_CT = self._shaped.returns(measured_CT.flip(1).cumsum(dim=1).flip(1))
        later_CT = torch.where(layout.last_CT, 0.0, returns_CT.roll(-1, dims=1))
        return torch.where(layout.mask_CT, returns_CT - later_CT, 0.0)

    @property
    def greedy_C(self) -> Tensor:
        return self._shaped.greedy_G[self._batch.facts.group_ids_C]

    @cached_property
    def values_CT(self) -> Tensor:
        return self.layout.to_dense(self._required_statistics.values_RT)

    @property
    def bootstrap_C(self) -> Tensor:
        """The value after the end of truncated completions: that of the last row with a loss token."""
        batch, masks = self._batch, self._masks
        rows_R = torch.where(masks.loss_rows_R, torch.arange(len(batch.lengths_R), device=masks.loss_C.device), 0)
        last_C = torch.zeros_like(batch.facts.group_ids_C).scatter_reduce(0, batch.completion_ids_R, rows_R, "amax")
        truncated_C = masks.loss_C & (batch.facts.truncation_reason_C != NONE) & ~masks.zeroed_C
        ends_C = torch.zeros(len(truncated_C), dtype=torch.float64, device=truncated_C.device)
        end_values_R = self._required_statistics.end_values_R.double()
        return ends_C.masked_scatter(truncated_C, end_values_R[last_C[truncated_C]])

    @property
    def old_logprobs_CT(self) -> Tensor:
        return self.layout.to_dense(self._required_statistics.old_logprobs_RT)

    @property
    def sum_pi_squared_CT(self) -> Tensor:
        return self.layout.to_dense(self._required_statistics.sum_pi_squared_RT)

    @property
    def weights_CT(self) -> Tensor:
        if self._weights_RT is None:
            return torch.ones_like(self.mask_CT, dtype=torch.float64)
        return self.layout.to_dense(self._weights_RT)

    @property
    def _required_statistics(self) -> ForwardStatistics:
        if self._statistics is None:
            raise ValueError(f"estimator {self._settings.estimator.name} needs forward statistics of the batch")
        return self._statistics

    def _count(self, mask_RT: Tensor) -> Tensor:
        """Count these tokens over all rows of each completion."""
        zeros_C = torch.zeros_like(self._batch.facts.group_ids_C)
        return zeros_C.index_add(0, self._batch.completion_ids_R, mask_RT.sum(dim=1))


def _mean_over_tokens(values_RT: Tensor, mask_RT: Tensor, ids_R: Tensor, num_completions: int) -> Tensor:
    """Return the mean of masked values over each completion's tokens; 0 without any."""
    zeros_C = values_RT.new_zeros(num_completions)
    sums_C = zeros_C.index_add(0, ids_R, torch.where(mask_RT, values_RT, 0.0).sum(dim=1))
    return sums_C / zeros_C.index_add(0, ids_R, mask_RT.sum(dim=1).to(values_RT.dtype)).clamp(min=1)


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
        lengths_C = batch.branches.longest_C(batch.sampled_RT.sum(dim=1), batch.completion_ids_R)
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
        options = structs.asdict(self._normalization)
        return center_and_divisor(self.clipped_C, self.groups, self._masks.loss_C, **options)

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
