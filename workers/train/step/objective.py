"""What one optimizer batch is trained on: every tensor that the loss of any of its micro-batches is made from.

Three policies meet here: the one that sampled (behaviour, the engine's), the trainer's when the batch was formed, and
the trainer's now. Ratios are taken against the proximal log-probs, which are the second's, the first's, or between the
two; importance weights lead from the first to the second.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from workers.settings import Settings
from workers.train.algorithms.aggregation import Totals, factors
from workers.train.algorithms.diagnostics import correction_metrics
from workers.train.algorithms.divergence import DIVERGENCES
from workers.train.algorithms.importance import ImportanceWeights, importance_weights
from workers.train.algorithms.losses import LOSSES, LossOutput, policy_loss
from workers.train.algorithms.masks import Masks
from workers.train.algorithms.proximal import interpolated
from workers.train.algorithms.rejection import Rejection
from workers.train.algorithms.sequences import Sequences
from workers.train.algorithms.token_selection import select
from workers.train.algorithms.value import value_loss
from workers.train.model.logprobs import TokenLogprobs
from workers.train.ranks.ranks import Ranks
from workers.train.step.batch import Batch
from workers.train.step.estimation import Advantages
from workers.train.step.survey import Survey


class Settled(NamedTuple):
    """What a batch is compared with, fixed when it is formed; rows of the batch or of a part of it."""

    trainer_RT: Tensor
    """The trainer's log-probs, of tokens that a rule of rejection took out as well: metrics tell what it judged."""
    proximal_RT: Tensor
    """What ratios are taken against."""
    weights_RT: Tensor
    """Importance weights; 1 where there are none."""


def settle(
    batch: Batch, mask_RT: Tensor, trainer_RT: Tensor, version: int, settings: Settings, rows: Tensor | None = None
) -> Settled:
    """Fix proximal log-probs and importance weights.

    Args:
        batch: the batch.
        mask_RT: bool, tokens that bear loss, of these rows.
        trainer_RT: the trainer's log-probs of them when the batch was formed.
        version: the policy version that is trained.
        settings: of the run.
        rows: row numbers; all unless given. Weights that are normalised over the batch need all of them.
    """
    chosen = slice(None) if rows is None else rows
    width = mask_RT.shape[1]
    behaviour_RT = torch.where(mask_RT, batch.behaviour_logprobs_RT[chosen, :width], 0.0).to(trainer_RT.dtype)
    trainer_RT = trainer_RT.detach()
    filled_RT = torch.where(mask_RT, trainer_RT, 0.0)
    mode = settings.algorithm.proximal
    if mode == "engine":
        proximal_RT = behaviour_RT
    elif mode == "interpolate":
        versions_RT = batch.versions_RT[chosen, :width]
        proximal_RT = interpolated(behaviour_RT, filled_RT, versions_RT, mask_RT, version, method="loglinear")
    else:
        proximal_RT = filled_RT
    compared_RT = filled_RT if mode == "engine" else proximal_RT
    weights = weigh(compared_RT, behaviour_RT, mask_RT, batch.completion_ids_R[chosen], settings)
    weights_RT = torch.ones_like(trainer_RT) if weights is None else weights.weights_RT.to(trainer_RT.dtype)
    return Settled(trainer_RT, proximal_RT, weights_RT)


def weigh(
    compared_RT: Tensor, behaviour_RT: Tensor, mask_RT: Tensor, completion_ids_R: Tensor, settings: Settings
) -> ImportanceWeights | None:
    """The importance weights that the settings ask for, if they do."""
    correction = settings.correction.resolved()
    if correction.weights == "none":
        return None
    return importance_weights(
        compared_RT,
        behaviour_RT,
        mask_RT,
        completion_ids_R,
        level=correction.weights,
        lower=correction.lower,
        upper=correction.upper,
        outside=correction.outside,
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
        settled: what was fixed already; without it, each micro-batch is settled by its first pass, whose weights are
            still those of the moment when the batch was formed.
        survey: where a critic is trained, its old values.
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
        settled: Settled | None = None,
        survey: Survey | None = None,
        seed: int = 0,
    ) -> None:
        self.batch, self.masks, self.advantages = batch, masks, advantages
        self.version, self.settings, self.survey = version, settings, survey
        self._settled_already = settled is not None
        zeros_RT = torch.zeros_like(batch.behaviour_logprobs_RT)
        self.settled = settled or Settled(zeros_RT, zeros_RT.clone(), zeros_RT.clone())
        lengths = Sequences(masks.tokens_RT, batch.completion_ids_R)
        self.totals = Totals(tokens=int(masks.tokens_RT.sum()), completions=int((lengths.length_S > 0).sum()))
        self.factors_R = factors(
            settings.aggregation,
            lengths.length_S[lengths.codes_R],
            self.totals,
            constant=settings.algorithm.aggregation_constant or settings.rollout.max_tokens,
        )
        self.chosen_RT = self._choose(seed)

    def share(
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
        mask = self.masks.tokens_RT[rows, :width]
        factors_M = self.factors_R[rows]
        logprobs = _laid(mask, found.logprobs_N)
        if first and not self._settled_already:
            for whole, part in zip(
                self.settled,
                settle(self.batch, mask, logprobs, self.version, self.settings, rows),
                strict=True,
            ):
                whole[rows, :width] = part
        output = policy_loss(
            self.settings.loss.name,
            logprobs,
            proximal_RT=self.settled.proximal_RT[rows, :width],
            advantages_RT=self.advantages.tokens_RT[rows, :width],
            mask_RT=mask,
            completion_ids_R=self.batch.completion_ids_R[rows],
            factors_R=factors_M,
            weights_RT=self.settled.weights_RT[rows, :width],
            chosen_RT=None if self.chosen_RT is None else self.chosen_RT[rows, :width],
            options=self.settings.loss.options,
        )
        loss, sums, maxima = output.loss, dict(output.sums), dict(output.maxima)
        if found.entropy_N is not None:
            entropy = _laid(mask, found.entropy_N)
            if first:
                sums["entropy"] = entropy.detach().sum()
            if algorithm.entropy_coefficient:
                loss = loss - algorithm.entropy_coefficient * _weighted(entropy, factors_M)
        if reference_N is not None:
            pair = {"logprobs": found.logprobs_N, "reference": reference_N}
            divergence = _laid(mask, DIVERGENCES[algorithm.kl_divergence](pair, {}))
            sums["reference/kl"] = divergence.detach().sum()
            loss = loss + algorithm.kl_coefficient * _weighted(divergence, factors_M)
        if values_N is not None and self.survey is not None and self.advantages.returns_RT is not None:
            learnt = value_loss(
                _laid(mask, values_N),
                self.survey.values_RT[rows, :width],
                self.advantages.returns_RT[rows, :width],
                mask,
                factors_M,
                clip=self.settings.critic.value_clip,
            )
            loss, sums = loss + learnt.loss, sums | learnt.sums
        return LossOutput(loss=loss, sums=sums, maxima=maxima)

    def share_settled(self, ranks: Ranks) -> None:
        """Make what each rank settled by its own first passes known to all of them."""
        if not self._settled_already:
            for tensor in self.settled:
                ranks.add(tensor)

    def _choose(self, seed: int) -> Tensor | None:
        """Tokens that the loss treats apart, chosen once over the whole batch."""
        selector = LOSSES[self.settings.loss.name].declared.selector
        if not selector:
            return None
        return select(
            selector,
            self.settled.trainer_RT,
            self.settled.proximal_RT,
            self.advantages.tokens_RT,
            self.masks.tokens_RT,
            torch.Generator().manual_seed(seed),
            self.settings.loss.options,
        )


def correction_report(objective: Objective, rejection: Rejection | None) -> dict[str, float]:
    """How far trainer and engine were apart when the batch was formed, what was rejected, how the weights look."""
    mask_RT, ids_R = objective.masks.tokens_RT, objective.batch.completion_ids_R
    behaviour_RT, settled = objective.batch.behaviour_logprobs_RT, objective.settled
    bypass = objective.settings.algorithm.proximal == "engine"
    compared_RT = settled.trainer_RT if bypass else settled.proximal_RT
    weights = weigh(compared_RT, behaviour_RT, mask_RT, ids_R, objective.settings)
    found = correction_metrics(settled.trainer_RT, behaviour_RT, mask_RT, ids_R, rejection=rejection, weights=weights)
    return {f"correction/{name}": float(value) for name, value in found.items()}


def _laid(mask: Tensor, values_N: Tensor) -> Tensor:
    """Values of the mask's tokens in their places, 0 elsewhere."""
    return torch.zeros_like(mask, dtype=values_N.dtype).masked_scatter(mask, values_N)


def _weighted(values: Tensor, factors_M: Tensor) -> Tensor:
    return (values * factors_M.to(values.dtype).unsqueeze(1)).sum()
