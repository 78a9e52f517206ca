"""Passes of the models over rows of a batch: the policy, the reference beside it, the critic on top."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from stream.errors import SettingsError
from workers.settings import Settings
from workers.train.algorithms.losses import LossOutput
from workers.train.distributed.ranks import Ranks
from workers.train.model.critic import Critic
from workers.train.model.logprobs import LogprobModel, TokenLogprobs, token_logprobs
from workers.train.model.packing import set_attention
from workers.train.step.batch import Batch, split_micro_batches
from workers.train.step.forward_statistics import ForwardStatistics
from workers.train.step.prepared_batch import PreparedBatch


class ModelRunner:
    """The models of a learner, and how they are read.

    Args:
        policy: the model that is trained.
        reference: the policy of the beginning; None where no divergence is asked for.
        critic: None unless the estimator needs values.
        settings: of the run.
        ranks: that share the work.
        as_reference: makes the reference the policy of the beginning, for a pass; for one that is the policy itself,
            with an adapter that is switched off.

    Raises:
        SettingsError: the settings ask for an attention, or for packing, that is not to be had of these models.
    """

    def __init__(
        self,
        policy: LogprobModel,
        reference: LogprobModel | None,
        critic: Critic | None,
        settings: Settings,
        ranks: Ranks,
        *,
        as_reference: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.settings, self.ranks, self.critic = settings, ranks, critic
        self.policy = self._with_attention(policy)
        self.reference = None if reference is None else self._with_attention(reference)
        self._as_begun = as_reference

    def micro_batches(self, batch: Batch, rows_R: Tensor) -> list[Tensor | None]:
        """Row numbers of each of this rank's micro-batches over these rows (bool); None: others have one more."""
        tokens = self.settings.train.micro_batch_tokens
        return self.ranks.local_batches(split_micro_batches(batch, tokens, rows_R, packed=self.policy.packed))

    def forward_statistics(self, batch: Batch, mask_RT: Tensor) -> ForwardStatistics:
        """A pass without gradient over the tokens that may bear loss."""
        zeros_RT = torch.zeros_like(batch.rollout_logprobs_RT)
        logprobs_RT, sum_pi_squared_RT, values_RT = zeros_RT, zeros_RT.clone(), zeros_RT.clone()
        end_values_R = zeros_RT.new_zeros(len(batch.lengths_R))
        with torch.no_grad():
            for rows in self.micro_batches(batch, mask_RT.any(dim=1)):
                if rows is None:
                    self.dummy_forward(batch)
                    continue
                width = int(batch.lengths_R[rows].max())
                mask = mask_RT[rows, :width]
                found = self._forward(self.policy, batch, rows, mask, squares=True, ends=self.critic is not None)
                for whole, part in ((logprobs_RT, found.logprobs_N), (sum_pi_squared_RT, found.sum_pi_squared_N)):
                    whole[rows, :width] = torch.zeros_like(whole[rows, :width]).masked_scatter(mask, _required(part))
                if self.critic is not None:
                    values_N = self.critic(_required(found.hidden_NH))
                    values_RT[rows, :width] = torch.zeros_like(values_RT[rows, :width]).masked_scatter(mask, values_N)
                    end_values_R[rows] = self.critic(_required(found.end_hidden_MH))
        add = self.ranks.all_reduce
        return ForwardStatistics(
            old_logprobs_RT=add(logprobs_RT),
            sum_pi_squared_RT=add(sum_pi_squared_RT),
            values_RT=add(values_RT),
            end_values_R=add(end_values_R),
        )

    def backward(self, formed: PreparedBatch, rows: Tensor, *, first: bool) -> LossOutput:
        """Forward and backward over one micro-batch."""
        batch = formed.batch
        mask_MT = formed.masks.loss_tokens_RT[rows, : int(batch.lengths_R[rows].max())]
        found = self._forward(self.policy, batch, rows, mask_MT, entropy=first)
        reference_N = None
        if self.reference is not None:
            with torch.no_grad(), self._as_begun():
                reference_N = self._forward(self.reference, batch, rows, mask_MT).logprobs_N
        values_N = None if self.critic is None else self.critic(_required(found.hidden_NH))
        output = formed.objective.micro_batch_loss(rows, found, first=first, reference_N=reference_N, values_N=values_N)
        output.loss.backward()  # type: ignore[no-untyped-call]
        return output

    def dummy_forward(self, batch: Batch) -> None:
        """Go through the models with the other ranks, where this one has no micro-batch: for one token, and nothing.

        With gradients there is a backward pass too, of a loss that is 0 whatever the model says.
        """
        rows = batch.lengths_R.new_zeros(1)
        mask_MT = torch.tensor([[False, True]], device=rows.device)
        found = self._forward(self.policy, batch, rows, mask_MT)
        if not torch.is_grad_enabled():
            return
        if self.reference is not None:
            with torch.no_grad(), self._as_begun():
                self._forward(self.reference, batch, rows, mask_MT)
        (found.logprobs_N.sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    def _with_attention(self, read: LogprobModel) -> LogprobModel:
        dtype = torch.bfloat16 if self.settings.model.dtype == "bfloat16" else next(read.model.parameters()).dtype
        chosen = set_attention(read, self.settings.train, dtype)
        ways, _ = self.ranks.all_reduce_metrics({"packed" if chosen.packed else "padded": 1.0}, {})
        if len(ways) > 1:  # said by all of them, so that none waits for one that has left
            raise SettingsError(
                "rows are packed at some ranks and padded at others, whose devices have not the same; set "
                "train.packing to 'off', or train.attention to one that all devices have"
            )
        return chosen

    def _forward(
        self,
        read: LogprobModel,
        batch: Batch,
        rows: Tensor,
        mask_MT: Tensor,
        *,
        entropy: bool = False,
        squares: bool = False,
        ends: bool = False,
    ) -> TokenLogprobs:
        bonus = self.settings.algorithm.entropy_coefficient > 0 and torch.is_grad_enabled()
        with torch.autocast(mask_MT.device.type, torch.bfloat16, enabled=self.settings.model.dtype == "bfloat16"):
            return token_logprobs(
                read,
                batch.tokens_RT[rows, : mask_MT.shape[1]],
                mask_MT,
                temperature=self.settings.rollout.temperature,
                lengths_M=batch.lengths_R[rows].clamp(
                    max=mask_MT.shape[1]
                ),  # an idle pass reads the beginning of a row
                entropy="gradient" if bonus else "value" if entropy else "",
                sum_pi_squared=squares,
                end_states=ends,
            )


def _required(tensor: Tensor | None) -> Tensor:
    """What was asked for, and is therefore there."""
    if tensor is None:
        raise ValueError("the model's output layer is no module of its own, so its hidden states cannot be had")
    return tensor
