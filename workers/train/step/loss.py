"""The loss of one micro-batch: policy loss, entropy bonus, KL penalty and value loss, read from the prepared batch."""

import torch
from torch import Tensor

from workers.settings import Settings
from workers.settings.estimator_options import Gae
from workers.train.algorithms.divergence import DIVERGENCES
from workers.train.algorithms.losses import LossInputs, LossOutput, policy_loss, value_loss
from workers.train.algorithms.sequences import Sequences
from workers.train.model.logprobs import TokenLogprobs
from workers.train.step.prepared_batch import CompleteComparison, PreparedBatch, compare_policies


def micro_batch_loss(
    prepared: PreparedBatch,
    settings: Settings,
    rows: Tensor,
    outputs: TokenLogprobs,
    *,
    first: bool,
    reference_N: Tensor | None = None,
    values_N: Tensor | None = None,
) -> LossOutput:
    """Compute the share of the batch's loss that one micro-batch bears.

    Args:
        prepared: the batch.
        settings: of the run.
        rows: row numbers of the micro-batch; all rows of a completion together.
        outputs: of its loss tokens, with gradient.
        first: True in the first update, when the model's weights are still the old ones.
        reference_N: log-probs of the same tokens under the reference policy; None without a KL penalty.
        values_N: the critic's values before the same tokens, with gradient; None without a critic.
    """
    width = int(prepared.batch.lengths_R[rows].max())
    mask = prepared.masks.loss_tokens_RT[rows, :width]
    sequences = Sequences(mask, prepared.batch.completion_ids_R[rows])
    factors_M = prepared.loss_weights.row_factors_R[rows]
    logprobs = _scatter(mask, outputs.logprobs_N)
    if first and not isinstance(prepared.policies, CompleteComparison):
        part = compare_policies(prepared.batch, sequences, logprobs, prepared.version, settings, rows)
        prepared.policies.record(rows, part)
    selected_RT = prepared.loss_weights.selected_RT
    inputs = LossInputs(
        logprobs_RT=logprobs,
        proximal_RT=prepared.policies.proximal_RT[rows, :width],
        advantages_RT=prepared.advantages.tokens_RT[rows, :width],
        sequences=sequences,
        weights_RT=prepared.policies.weights_RT[rows, :width],
        selected_RT=None if selected_RT is None else selected_RT[rows, :width],
    )
    output = policy_loss(settings.loss.name, inputs, factors_M, settings.loss.options)
    loss, sums = output.loss, dict(output.sums)
    algorithm = settings.algorithm
    if outputs.entropy_N is not None:
        entropy = _scatter(mask, outputs.entropy_N)
        if first:
            sums["entropy"] = entropy.detach().sum()
        if algorithm.entropy_coefficient:
            loss = loss - algorithm.entropy_coefficient * _weighted_sum(entropy, factors_M)
    if reference_N is not None:
        pair = {"logprobs": outputs.logprobs_N, "reference": reference_N}
        divergence = _scatter(mask, DIVERGENCES[algorithm.kl_estimator](pair, {}))
        sums["reference/kl"] = divergence.detach().sum()
        loss = loss + algorithm.kl_coefficient * _weighted_sum(divergence, factors_M)
    if values_N is not None:
        critic = _value_loss(prepared, settings, rows, mask, values_N)
        loss, sums = loss + critic.loss, sums | critic.sums
    return LossOutput(loss=loss, sums=sums, maxima=output.maxima)


def _value_loss(
    prepared: PreparedBatch, settings: Settings, rows: Tensor, mask: Tensor, values_N: Tensor
) -> LossOutput:
    estimator, statistics, returns_RT = settings.estimator, prepared.statistics, prepared.advantages.returns_RT
    if not isinstance(estimator, Gae) or statistics is None or returns_RT is None:
        raise ValueError(f"estimator {estimator.name} gives a critic neither old values nor returns")
    width = mask.shape[1]
    return value_loss(
        _scatter(mask, values_N),
        statistics.values_RT[rows, :width],
        returns_RT[rows, :width],
        mask,
        prepared.loss_weights.row_factors_R[rows],
        clip=estimator.critic_value_clip,
    )


def _scatter(mask: Tensor, values_N: Tensor) -> Tensor:
    """Put the values of masked tokens in their positions, 0 elsewhere."""
    return torch.zeros_like(mask, dtype=values_N.dtype).masked_scatter(mask, values_N)


def _weighted_sum(values: Tensor, factors_M: Tensor) -> Tensor:
    return (values * factors_M.to(values.dtype).unsqueeze(1)).sum()
