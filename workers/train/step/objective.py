"""What one optimizer batch is trained on: every tensor that the loss of any of its micro-batches is made from.

Three policies meet here: the one that sampled (behaviour, the engine's), the trainer's when the batch was formed, and
the trainer's now. Ratios are taken against the proximal log-probs, which are the second's, the first's, or between the
two; importance weights lead from the first to the second.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from workers.settings import Settings
from workers.settings.estimators import Gae
from workers.train.algorithms.aggregation import BatchTotals, row_factors
from workers.train.algorithms.correction_metrics import correction_metrics
from workers.train.algorithms.divergence import DIVERGENCES
from workers.train.algorithms.importance import ImportanceWeights, importance_weights
from workers.train.algorithms.losses import LOSSES, LossOutput, policy_loss
from workers.train.algorithms.masks import Masks
from workers.train.algorithms.proximal import interpolate_logprobs
from workers.train.algorithms.rejection import Rejection
from workers.train.algorithms.sequences import Sequences
from workers.train.algorithms.token_selection import select_tokens
from workers.train.algorithms.value import value_loss
from workers.train.distributed.ranks import Ranks
from workers.train.model.logprobs import TokenLogprobs
from workers.train.step.batch import Batch
from workers.train.step.estimation import Advantages
from workers.train.step.forward_statistics import ForwardStatistics


class PolicyComparison(NamedTuple):
    """What a batch is compared with, fixed when it is formed; rows of the batch or of a part of it."""

    old_logprobs_RT: Tensor
    """The trainer's log-probs, of tokens that a rule of rejection took out as well: metrics tell what it judged."""
    proximal_RT: Tensor
    """What ratios are taken against."""
    weights_RT: Tensor
    """Importance weights; 1 where there are none."""


def compare_policies(
    batch: Batch, mask_RT: Tensor, old_logprobs_RT: Tensor, version: int, settings: Settings, rows: Tensor | None = None
) -> PolicyComparison:
    """Fix proximal log-probs and importance weights.

    Args:
        batch: the batch.
        mask_RT: bool, tokens that bear loss, of these rows.
        old_logprobs_RT: the trainer's log-probs of them when the batch was formed.
        version: the policy version that is trained.
        settings: of the run.
        rows: row numbers; all unless given. Weights that are normalised over the batch need all of them.
    """
    chosen = slice(None) if rows is None else rows
    width = mask_RT.shape[1]
    rollout_logprobs_RT = torch.where(mask_RT, batch.rollout_logprobs_RT[chosen, :width], 0.0).to(old_logprobs_RT.dtype)
    old_logprobs_RT = old_logprobs_RT.detach()
    filled_RT = torch.where(mask_RT, old_logprobs_RT, 0.0)
    mode = settings.algorithm.proximal
    if mode == "engine":
        proximal_RT = rollout_logprobs_RT
    elif mode == "interpolate":
        versions_RT = batch.versions_RT[chosen, :width]
        proximal_RT = interpolate_logprobs(
            rollout_logprobs_RT, filled_RT, versions_RT, mask_RT, version, method="loglinear"
        )
    else:
        proximal_RT = filled_RT
    compared_RT = filled_RT if mode == "engine" else proximal_RT
    weights = compute_importance_weights(
        compared_RT, rollout_logprobs_RT, mask_RT, batch.completion_ids_R[chosen], settings
    )
    weights_RT = torch.ones_like(old_logprobs_RT) if weights is None else weights.weights_RT.to(old_logprobs_RT.dtype)
    return PolicyComparison(old_logprobs_RT, proximal_RT, weights_RT)


def compute_importance_weights(
    compared_RT: Tensor, rollout_logprobs_RT: Tensor, mask_RT: Tensor, completion_ids_R: Tensor, settings: Settings
) -> ImportanceWeights | None:
    """The importance weights that the settings ask for, if they do."""
    correction = settings.correction.resolved()
    if correction.level == "none":
        return None
    lower, upper = correction.weight_range
    return importance_weights(
        compared_RT,
        rollout_logprobs_RT,
        mask_RT,
        completion_ids_R,
        level=correction.level,
        lower=lower,
        upper=upper,
        out_of_range=correction.out_of_range,
        normalize=correction.normalize,
    )


class Objective:
    """The loss of one optimizer batch, micro-batch by micro-batch.

    Args:
        batch: the batch.
        masks: its final masks.
        advantages: of the same.
        version: the policy version that is trained.
        settings: of the run.
        comparison: what was fixed already; without it, each micro-batch is settled by its first pass, whose weights are
            still those of the moment when the batch was formed.
        statistics: where a critic is trained, its old values.
        seed: of the tokens that a loss chooses by lot.
    """

    def __init__(
        self,
        batch: Batch,
        masks: Masks,
        advantages: Advantages,
        version: int,
        settings: Settings,
        *,
        comparison: PolicyComparison | None = None,
        statistics: ForwardStatistics | None = None,
        seed: int = 0,
    ) -> None:
        self.batch, self.masks, self.advantages = batch, masks, advantages
        self.version, self.settings, self.survey = version, settings, statistics
        self._settled_already = comparison is not None
        zeros_RT = torch.zeros_like(batch.rollout_logprobs_RT)
        self.comparison = comparison or PolicyComparison(zeros_RT, zeros_RT.clone(), zeros_RT.clone())
        lengths = Sequences(masks.loss_tokens_RT, batch.completion_ids_R)
        self.totals = BatchTotals(
            tokens=int(masks.loss_tokens_RT.sum()), completions=int((lengths.lengths_S > 0).sum())
        )
        self.factors_R = row_factors(
            settings.aggregation,
            lengths.lengths_S[lengths.codes_R],
            self.totals,
            constant=settings.rollout.max_tokens,
        )
        self.selected_RT = self._choose(seed)

    def micro_batch_loss(
        self,
        rows: Tensor,
        found: TokenLogprobs,
        *,
        first: bool,
        reference_N: Tensor | None = None,
        values_N: Tensor | None = None,
    ) -> LossOutput:
        """The share of one micro-batch.

        Args:
            rows: its row numbers; all rows of a completion together.
            found: of its loss tokens, with gradient.
            first: the weights are still those of the moment when the batch was formed.
            reference_N: log-probs of the same tokens under the reference policy, for the divergence.
            values_N: the critic's values of the same, with gradient.
        """
        algorithm, width = self.settings.algorithm, int(self.batch.lengths_R[rows].max())
        mask = self.masks.loss_tokens_RT[rows, :width]
        factors_M = self.factors_R[rows]
        logprobs = _scatter(mask, found.logprobs_N)
        if first and not self._settled_already:
            for whole, part in zip(
                self.comparison,
                compare_policies(self.batch, mask, logprobs, self.version, self.settings, rows),
                strict=True,
            ):
                whole[rows, :width] = part
        output = policy_loss(
            self.settings.loss.name,
            logprobs,
            proximal_RT=self.comparison.proximal_RT[rows, :width],
            advantages_RT=self.advantages.tokens_RT[rows, :width],
            mask_RT=mask,
            completion_ids_R=self.batch.completion_ids_R[rows],
            factors_R=factors_M,
            weights_RT=self.comparison.weights_RT[rows, :width],
            selected_RT=None if self.selected_RT is None else self.selected_RT[rows, :width],
            options=self.settings.loss.options,
        )
        loss, sums, maxima = output.loss, dict(output.sums), dict(output.maxima)
        if found.entropy_N is not None:
            entropy = _scatter(mask, found.entropy_N)
            if first:
                sums["entropy"] = entropy.detach().sum()
            if algorithm.entropy_coefficient:
                loss = loss - algorithm.entropy_coefficient * _weighted_sum(entropy, factors_M)
        if reference_N is not None:
            pair = {"logprobs": found.logprobs_N, "reference": reference_N}
            divergence = _scatter(mask, DIVERGENCES[algorithm.kl_estimator](pair, {}))
            sums["reference/kl"] = divergence.detach().sum()
            loss = loss + algorithm.kl_coefficient * _weighted_sum(divergence, factors_M)
        estimator = self.settings.estimator
        if (
            values_N is not None
            and isinstance(estimator, Gae)
            and self.survey is not None
            and self.advantages.returns_RT is not None
        ):
            learnt = value_loss(
                _scatter(mask, values_N),
                self.survey.values_RT[rows, :width],
                self.advantages.returns_RT[rows, :width],
                mask,
                factors_M,
                clip=estimator.critic_value_clip,
            )
            loss, sums = loss + learnt.loss, sums | learnt.sums
        return LossOutput(loss=loss, sums=sums, maxima=maxima)

    def add_over_ranks(self, ranks: Ranks) -> None:
        """Make what each rank settled by its own first passes known to all of them."""
        if not self._settled_already:
            for tensor in self.comparison:
                ranks.all_reduce(tensor)

    def _choose(self, seed: int) -> Tensor | None:
        """Tokens that the loss treats apart, chosen once over the whole batch."""
        selector = LOSSES[self.settings.loss.name].traits.selector
        if not selector:
            return None
        return select_tokens(
            selector,
            self.comparison.old_logprobs_RT,
            self.comparison.proximal_RT,
            self.advantages.tokens_RT,
            self.masks.loss_tokens_RT,
            torch.Generator().manual_seed(seed),
            self.settings.loss.options,
        )


def correction_step_metrics(objective: Objective, rejection: Rejection | None) -> dict[str, float]:
    """How far trainer and engine were apart when the batch was formed, what was rejected, how the weights look."""
    mask_RT, ids_R = objective.masks.loss_tokens_RT, objective.batch.completion_ids_R
    rollout_logprobs_RT, settled = objective.batch.rollout_logprobs_RT, objective.comparison
    bypass = objective.settings.algorithm.proximal == "engine"
    compared_RT = settled.old_logprobs_RT if bypass else settled.proximal_RT
    weights = compute_importance_weights(compared_RT, rollout_logprobs_RT, mask_RT, ids_R, objective.settings)
    found = correction_metrics(
        settled.old_logprobs_RT, rollout_logprobs_RT, mask_RT, ids_R, rejection=rejection, weights=weights
    )
    return {f"correction/{name}": float(value) for name, value in found.items()}


def _scatter(mask: Tensor, values_N: Tensor) -> Tensor:
    """Values of the mask's tokens in their places, 0 elsewhere."""
    return torch.zeros_like(mask, dtype=values_N.dtype).masked_scatter(mask, values_N)


def _weighted_sum(values: Tensor, factors_M: Tensor) -> Tensor:
    return (values * factors_M.to(values.dtype).unsqueeze(1)).sum()
