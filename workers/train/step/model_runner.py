"""Passes of the policy, the reference policy and the critic over micro-batches of rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from stream.errors import SettingsError
from workers.settings import Settings
from workers.train.algorithms.losses import LossOutput
from workers.train.model.attention import set_attention
from workers.train.model.attention_kernels import switch_attention
from workers.train.model.lm_head import Critic
from workers.train.model.logprobs import LogprobModel, TokenLogprobs, token_logprobs
from workers.train.ranks import Ranks
from workers.train.step.batch import Batch, ForwardStatistics
from workers.train.step.loss import micro_batch_loss
from workers.train.step.memory_plan import MAX_TOKENS
from workers.train.step.micro_batches import MicroBatch, MicroBatches, plan_micro_batches
from workers.train.step.prepared_batch import PreparedBatch


class ModelRunner:
    """Runs the models of a learner over micro-batches.

    Args:
        policy: the model in training.
        reference: the reference policy; None without a KL penalty.
        critic: None unless the estimator needs values.
        settings: of the run.
        ranks: that share the work.
        as_reference: context in which `reference` is the initial policy; with LoRA it is the policy with its adapter
            disabled.

    Raises:
        SettingsError: these models do not support the attention or packing that the settings name.
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
        given = settings.train.micro_batch_tokens
        self.micro_batch_tokens = MAX_TOKENS if given == "auto" else given
        """The largest number of tokens of a pass."""
        self.policy = self._with_attention(policy)
        self.reference = None if reference is None else self._with_attention(reference)
        self._as_reference = as_reference

    def plan(self, batch: Batch, rows_R: Tensor) -> MicroBatches:
        """Partition some rows into the micro-batches of all ranks."""
        share = self.settings.train.share_history if self.policy.can_share else "off"
        return plan_micro_batches(batch, self.micro_batch_tokens, rows_R, packed=self.policy.packed, share=share)

    def forward_statistics(self, batch: Batch, mask_RT: Tensor) -> ForwardStatistics:
        """Run policy and critic without gradient over the tokens that may bear loss."""
        zeros_RT = torch.zeros_like(batch.rollout_logprobs_RT)
        logprobs_RT, sum_pi_squared_RT, values_RT = zeros_RT, zeros_RT.clone(), zeros_RT.clone()
        end_values_R = zeros_RT.new_zeros(len(batch.lengths_R))
        with torch.no_grad():
            for part in self.ranks.local_batches(self.plan(batch, mask_RT.any(dim=1)).parts):
                if part is None:
                    self.dummy_forward(batch)
                    continue
                rows, width = part.rows, int(batch.lengths_R[part.rows].max())
                mask = mask_RT[rows, :width]
                outputs = self._forward(
                    self.policy, batch, part, mask, sum_pi_squared=True, end_states=self.critic is not None
                )
                for whole, own in ((logprobs_RT, outputs.logprobs_N), (sum_pi_squared_RT, outputs.sum_pi_squared_N)):
                    whole[rows, :width] = torch.zeros_like(whole[rows, :width]).masked_scatter(mask, _required(own))
                if self.critic is not None:
                    values_N = self.critic(_required(outputs.hidden_NH))
                    values_RT[rows, :width] = torch.zeros_like(values_RT[rows, :width]).masked_scatter(mask, values_N)
                    end_values_R[rows] = self.critic(_required(outputs.end_hidden_MH))
        self.use_row_attention()
        add = self.ranks.all_reduce
        return ForwardStatistics(
            old_logprobs_RT=add(logprobs_RT),
            sum_pi_squared_RT=add(sum_pi_squared_RT),
            values_RT=add(values_RT),
            end_values_R=add(end_values_R),
        )

    def backward(self, prepared: PreparedBatch, part: MicroBatch, *, first: bool) -> LossOutput:
        """Run forward and backward over one micro-batch; `first` is True in the first update of a batch."""
        batch, rows = prepared.batch, part.rows
        mask_MT = prepared.masks.loss_tokens_RT[rows, : int(batch.lengths_R[rows].max())]
        outputs = self._forward(self.policy, batch, part, mask_MT, entropy=first)
        reference_N = None
        if self.reference is not None:
            with torch.no_grad(), self._as_reference():
                reference_N = self._forward(self.reference, batch, part, mask_MT).logprobs_N
        values_N = None if self.critic is None else self.critic(_required(outputs.hidden_NH))
        loss = micro_batch_loss(
            prepared, self.settings, rows, outputs, first=first, reference_N=reference_N, values_N=values_N
        )
        loss.loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def use_row_attention(self) -> None:
        """Set the models to attention over rows, for callers that know of no trees, once no backward pass is due."""
        for model in (self.policy, self.reference):
            if model is not None and model.can_share:
                switch_attention(model.model, model.row_attention)

    def dummy_forward(self, batch: Batch) -> None:
        """Run the models over one token in a turn in which only other ranks have a micro-batch.

        A pass through a sharded model is a collective, so every rank makes the same number of passes. With gradients
        enabled there is a backward pass too, of a loss that is always 0.
        """
        row = MicroBatch(batch.lengths_R.new_zeros(1))
        mask_MT = torch.tensor([[False, True]], device=row.rows.device)
        outputs = self._forward(self.policy, batch, row, mask_MT)
        if not torch.is_grad_enabled():
            return
        if self.reference is not None:
            with torch.no_grad(), self._as_reference():
                self._forward(self.reference, batch, row, mask_MT)
        (outputs.logprobs_N.sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    def _with_attention(self, model: LogprobModel) -> LogprobModel:
        dtype = torch.bfloat16 if self.settings.model.dtype == "bfloat16" else next(model.model.parameters()).dtype
        configured = set_attention(model, self.settings.train, dtype)
        layout = f"{'packed' if configured.packed else 'padded'}, {'shared' if configured.can_share else 'apart'}"
        layouts, _ = self.ranks.all_reduce_metrics({layout: 1.0}, {})
        if len(layouts) > 1:  # every rank raises, so none waits for one that has left
            raise SettingsError(
                f"ranks lay out rows in different ways ({'; '.join(layouts)}), because their devices differ; set "
                "train.packing and train.share_history to 'off', or train.attention to one that all devices support"
            )
        return configured

    def _forward(
        self,
        model: LogprobModel,
        batch: Batch,
        part: MicroBatch,
        mask_MT: Tensor,
        *,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        end_states: bool = False,
    ) -> TokenLogprobs:
        width = mask_MT.shape[1]
        bonus = self.settings.algorithm.entropy_coefficient > 0 and torch.is_grad_enabled()
        with torch.autocast(mask_MT.device.type, torch.bfloat16, enabled=self.settings.model.dtype == "bfloat16"):
            return token_logprobs(
                model._replace(tree=part.tree if model.can_share else None),
                batch.tokens_RT[part.rows, :width],
                mask_MT,
                temperature=self.settings.rollout.temperature,
                lengths_M=batch.lengths_R[part.rows].clamp(max=width),  # a dummy pass reads only the start of a row
                entropy="gradient" if bonus else "value" if entropy else "",
                sum_pi_squared=sum_pi_squared,
                end_states=end_states,
            )


def _required(tensor: Tensor | None) -> Tensor:
    """Return a tensor that was requested from the model.

    Raises:
        ValueError: the model cannot provide hidden states.
    """
    if tensor is None:
        raise ValueError("the model's output layer is not a separate module, so its hidden states cannot be captured")
    return tensor
