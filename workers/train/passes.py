"""Passes of the models over rows of a batch: the policy, the reference beside it, the critic on top."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from workers.settings import Settings
from workers.train.algorithms.losses import LossOutput
from workers.train.batch import Batch, split
from workers.train.critic import Critic
from workers.train.forming import Formed
from workers.train.logprobs import TokenLogprobs, token_logprobs
from workers.train.ranks import Ranks
from workers.train.survey import Survey


class Passes:
    """The models of a learner, and how they are read.

    Args:
        model: the policy.
        reference: lends the policy of the beginning for one pass; None where no divergence is asked for.
        critic: None unless the estimator needs values.
        settings: of the run.
        ranks: that share the work.
    """

    def __init__(
        self,
        model: Any,
        reference: Callable[[], AbstractContextManager[Any]] | None,
        critic: Critic | None,
        settings: Settings,
        ranks: Ranks,
    ) -> None:
        self.model, self.reference, self.critic = model, reference, critic
        self.settings, self.ranks = settings, ranks

    def survey(self, batch: Batch, mask_RT: Tensor) -> Survey:
        """A pass without gradient over the tokens that may bear loss."""
        zeros_RT = torch.zeros_like(batch.behaviour_logprobs_RT)
        logprobs_RT, squares_RT, values_RT = zeros_RT, zeros_RT.clone(), zeros_RT.clone()
        end_values_R = torch.zeros(len(batch.lengths_R), device=mask_RT.device)
        with torch.no_grad():
            for rows in self.ranks.mine(split(batch, self.settings.train.micro_batch_tokens, mask_RT.any(dim=1))):
                width = int(batch.lengths_R[rows].max())
                mask = mask_RT[rows, :width]
                found = self._read(self.model, batch, rows, mask, squares=True, ends=self.critic is not None)
                for whole, part in ((logprobs_RT, found.logprobs_N), (squares_RT, found.squares_N)):
                    whole[rows, :width] = torch.zeros_like(whole[rows, :width]).masked_scatter(mask, _given(part))
                if self.critic is not None:
                    values_N = self.critic(_given(found.hidden_NH))
                    values_RT[rows, :width] = torch.zeros_like(values_RT[rows, :width]).masked_scatter(mask, values_N)
                    end_values_R[rows] = self.critic(_given(found.end_hidden_MH))
        add = self.ranks.add
        return Survey(
            logprobs_RT=add(logprobs_RT),
            squares_RT=add(squares_RT),
            values_RT=add(values_RT),
            end_values_R=add(end_values_R),
        )

    def backward(self, formed: Formed, rows: Tensor, *, first: bool) -> LossOutput:
        """Forward and backward over one micro-batch."""
        batch = formed.batch
        mask_MT = formed.masks.tokens_RT[rows, : int(batch.lengths_R[rows].max())]
        found = self._read(self.model, batch, rows, mask_MT, entropy=first)
        reference_N = None
        if self.reference is not None:
            with torch.no_grad(), self.reference() as reference:
                reference_N = self._read(reference, batch, rows, mask_MT).logprobs_N
        values_N = None if self.critic is None else self.critic(_given(found.hidden_NH))
        output = formed.objective.share(rows, found, first=first, reference_N=reference_N, values_N=values_N)
        output.loss.backward()  # type: ignore[no-untyped-call]
        return output

    def _read(
        self,
        model: Any,
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
                model,
                batch.tokens_RT[rows, : mask_MT.shape[1]],
                mask_MT,
                temperature=self.settings.rollout.temperature,
                entropy="gradient" if bonus else "value" if entropy else "",
                squares=squares,
                lengths_M=batch.lengths_R[rows] if ends else None,
            )


def _given(tensor: Tensor | None) -> Tensor:
    """What was asked for, and is therefore there."""
    if tensor is None:
        raise ValueError("the model's output layer is no module of its own, so its hidden states cannot be had")
    return tensor
