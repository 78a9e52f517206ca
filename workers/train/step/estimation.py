"""Advantages of a batch under a run's settings: rewards made ready, the estimator called, the result on its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workers.settings import Normalization, Settings
from workers.train.algorithms.advantages import ESTIMATORS, TokenAdvantages, estimate
from workers.train.algorithms.completion_layout import CompletionLayout
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.masks import NONE, TRUNCATION_REASONS, Masks
from workers.train.algorithms.normalization import normalize, normalize_tokens
from workers.train.algorithms.shaping import clip_rewards, overlong_penalty, shift_and_scale
from workers.train.step.batch import Batch
from workers.train.step.forward_statistics import ForwardStatistics


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What the estimator said."""

    values_C: Tensor
    """float64, one for each completion; where each token has its own, their mean over the completion's loss tokens."""
    tokens_RT: Tensor
    """On the rows' tokens; a view where a completion has one for all of its tokens."""
    returns_RT: Tensor | None = None
    """What a critic is to learn; None where the estimator has no use for one."""


def estimate_advantages(
    batch: Batch,
    masks: Masks,
    settings: Settings,
    *,
    statistics: ForwardStatistics | None = None,
    weights_RT: Tensor | None = None,
) -> Advantages:
    """Estimate with the estimator and the normalisers that the settings name.

    Args:
        batch: the batch.
        masks: its final masks.
        settings: of the run.
        statistics: for the estimators that need log-probs or values.
        weights_RT: importance weights, for those that need them; 1 unless given.
    """
    inputs = _Inputs(batch, masks, settings, statistics, weights_RT)
    name = settings.estimator.name
    needs = {need: getattr(inputs, need) for need in ESTIMATORS[name].input_names}
    # The singleton policy speaks of the reward as it was made ready, whatever the estimator compares.
    needs |= {"rewards_C": inputs.rewards_C, "groups": inputs.groups}
    found = estimate(
        name, needs, settings.estimator.options, single_sample_policy=settings.algorithm.single_sample_policy
    )
    ids_R = batch.completion_ids_R
    if isinstance(found, TokenAdvantages):
        tokens_RT = inputs.trajectories.to_rows(found.advantages_CT)
        returns_RT = inputs.trajectories.to_rows(found.returns_CT)
    else:
        tokens_RT = found[ids_R].unsqueeze(1).expand(masks.loss_tokens_RT.shape)
        returns_RT = None
    chosen = Normalization.from_levels(settings.algorithm.advantage_normalization)
    if chosen == Normalization():
        values_C = found if not isinstance(found, TokenAdvantages) else None
    else:
        tokens_RT = normalize_tokens(tokens_RT, masks.loss_tokens_RT, batch.group_ids_R, **_options(chosen))
        values_C = None
    if values_C is None:
        values_C = _mean_over_tokens(tokens_RT, masks.loss_tokens_RT, ids_R, len(masks.loss_C))
    return Advantages(values_C, tokens_RT, returns_RT)


def greedy_baseline(batch: Batch, settings: Settings) -> tuple[Tensor, Tensor]:
    """Reward of each group's greedy completion under the truncation policy, and whether it may be a baseline.

    Returns:
        float64 (G), 0 where it may not, and bool (G).
    """
    policies = [settings.truncation_policy(reason) for reason in TRUNCATION_REASONS]
    excluded = torch.tensor([policy == "exclude" for policy in policies] + [False])
    zeroed = torch.tensor([policy == "zero_reward" for policy in policies] + [False])
    code_G = batch.greedy_truncated_G.cpu()  # the last place answers the code of "not truncated", which is -1
    device = batch.greedy_rewards_G.device
    known_G = batch.greedy_measured_G & ~excluded[code_G].to(device)
    return torch.where(known_G & ~zeroed[code_G].to(device), batch.greedy_rewards_G, 0.0), known_G


class _Inputs:
    """The inputs that an estimator may ask for, each made when it is asked for; named as the registry names them."""

    def __init__(
        self,
        batch: Batch,
        masks: Masks,
        settings: Settings,
        survey: ForwardStatistics | None,
        weights_RT: Tensor | None,
    ) -> None:
        self._batch, self._masks, self._settings = batch, masks, settings
        self._survey, self._weights_RT = survey, weights_RT

    @cached_property
    def groups(self) -> Grouping:
        facts = self._batch.facts
        return Grouping(facts.group_ids_C, self._masks.baseline_C, facts.num_groups)

    @cached_property
    def rewards_C(self) -> Tensor:
        masks, algorithm = self._masks, self._settings.algorithm
        chosen = Normalization.from_levels(algorithm.reward_normalization)
        tail, factor = algorithm.overlong_penalty
        rewards_C = masks.rewards_C
        if tail:
            rewards_C = rewards_C + overlong_penalty(
                self._completion_lengths_C(),
                masks.penalised_C,
                max_length=self._settings.rollout.max_tokens,
                tail=tail,
                factor=factor,
            )
        rewards_C = self._scaled(rewards_C, masks.baseline_C)
        if chosen == Normalization():
            return rewards_C
        normal_C: Tensor = normalize(rewards_C, self.groups, masks.loss_C, **_options(chosen))
        return normal_C

    def _scaled(self, rewards: Tensor, known: Tensor) -> Tensor:
        algorithm = self._settings.algorithm
        scaled: Tensor = shift_and_scale(rewards, known, bias=algorithm.reward_bias, scale=algorithm.reward_scale)
        bounded: Tensor = clip_rewards(scaled, known, limit=algorithm.reward_clip)
        return bounded

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
    def part_weights_P(self) -> Tensor:
        return self._batch.part_weights_P

    @property
    def correct_C(self) -> Tensor:
        return self._masks.baseline_C & (self._masks.rewards_C >= self._settings.algorithm.success_threshold)

    @cached_property
    def trajectories(self) -> CompletionLayout:
        batch = self._batch
        return CompletionLayout(
            batch.completion_ids_R, len(self._masks.loss_C), self._masks.loss_tokens_RT, batch.sampled_RT
        )

    @property
    def mask_CT(self) -> Tensor:
        return self.trajectories.mask_CT

    @cached_property
    def token_rewards_CT(self) -> Tensor:
        """Each turn's reward on that turn's last token, and what is left of the reward on the completion's last."""
        masks, ids_R = self._masks, self._batch.completion_ids_R
        speaking_R = (masks.loss_C & ~masks.zeroed_C)[ids_R]
        turns_RT = torch.where(masks.loss_tokens_RT & speaking_R.unsqueeze(1), self._batch.turn_rewards_RT, 0.0)
        turns_RT = turns_RT * self._settings.algorithm.reward_scale
        turns_C = self.rewards_C.new_zeros(len(masks.loss_C)).index_add(0, ids_R, turns_RT.sum(dim=1))
        rest_C = torch.where(masks.loss_C, self.rewards_C, 0.0) - turns_C
        return self.trajectories.to_dense(turns_RT) + self.trajectories.on_last_token(rest_C)

    @property
    def greedy_C(self) -> Tensor:
        rewards_G, known_G = greedy_baseline(self._batch, self._settings)
        return self._scaled(rewards_G, known_G)[self._batch.facts.group_ids_C]

    @cached_property
    def values_CT(self) -> Tensor:
        return self.trajectories.to_dense(self._seen.values_RT)

    @property
    def bootstrap_C(self) -> Tensor:
        """The value after the end of completions that were cut short: that of the last row with a token left."""
        batch, masks = self._batch, self._masks
        rows_R = torch.where(masks.loss_rows_R, torch.arange(len(batch.lengths_R), device=masks.loss_C.device), 0)
        last_C = torch.zeros_like(batch.facts.group_ids_C).scatter_reduce(0, batch.completion_ids_R, rows_R, "amax")
        cut_C = masks.loss_C & (batch.facts.truncation_reason_C != NONE) & ~masks.zeroed_C
        ends_C = torch.zeros(len(cut_C), dtype=torch.float64, device=cut_C.device)
        return ends_C.masked_scatter(cut_C, self._seen.end_values_R.double()[last_C[cut_C]])

    @property
    def old_logprobs_CT(self) -> Tensor:
        return self.trajectories.to_dense(self._seen.old_logprobs_RT)

    @property
    def sum_pi_squared_CT(self) -> Tensor:
        return self.trajectories.to_dense(self._seen.sum_pi_squared_RT)

    @property
    def weights_CT(self) -> Tensor:
        if self._weights_RT is None:
            return torch.ones_like(self.mask_CT, dtype=torch.float64)
        return self.trajectories.to_dense(self._weights_RT)

    def _completion_lengths_C(self) -> Tensor:
        """Sampled tokens, over all rows: a tool's tokens and how rows are cut are not the policy's doing."""
        return self._count(self._batch.sampled_RT)

    @property
    def _seen(self) -> ForwardStatistics:
        if self._survey is None:
            raise ValueError(f"{self._settings.estimator.name} needs a survey of the batch")
        return self._survey

    def _count(self, mask_RT: Tensor) -> Tensor:
        zeros_C = torch.zeros_like(self._batch.facts.group_ids_C)
        return zeros_C.index_add(0, self._batch.completion_ids_R, mask_RT.sum(dim=1))


FROM_FORWARD_STATISTICS = ("values_CT", "bootstrap_C", "old_logprobs_CT", "sum_pi_squared_CT")
"""Inputs that come from a pass of the model."""


def _options(chosen: Normalization) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in chosen.__struct_fields__}


def _mean_over_tokens(values_RT: Tensor, mask_RT: Tensor, ids_R: Tensor, completions: int) -> Tensor:
    add: Callable[[Tensor], Tensor] = lambda x_R: values_RT.new_zeros(completions).index_add(0, ids_R, x_R)  # noqa: E731
    sums_C = add(torch.where(mask_RT, values_RT, 0.0).sum(dim=1))
    return sums_C / add(mask_RT.sum(dim=1).to(values_RT.dtype)).clamp(min=1)
