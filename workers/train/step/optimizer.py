"""The optimizer: AdamW over the policy's trained parameters and the critic, with its state as tensors by name.

A schedule gives each step a factor, by which the peak learning rates are multiplied.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from workers.settings import Settings
from workers.settings.estimator_options import Gae
from workers.train.ranks import Ranks, broadcast_into, clip_grad_norm

_BETAS = (0.9, 0.95)


class Optimizer:
    """AdamW with weight decay on the policy's matrices; gains, biases and the critic do not decay.

    Args:
        policy: the policy's trained parameters, by name.
        critic: the critic's parameters; empty without a critic.
        settings: the run's settings.
    """

    def __init__(
        self, policy: Mapping[str, torch.nn.Parameter], critic: Mapping[str, torch.nn.Parameter], settings: Settings
    ) -> None:
        self.policy, self.critic = policy, critic
        self.settings = settings.train
        peak = settings.train.learning_rate
        groups = [
            {"params": [p for p in policy.values() if p.ndim >= 2], "peak": peak},
            {"params": [p for p in policy.values() if p.ndim < 2], "weight_decay": 0.0, "peak": peak},
        ]
        if isinstance(settings.estimator, Gae):
            critic_peak = settings.estimator.critic_learning_rate
            groups.append({"params": [*critic.values()], "weight_decay": 0.0, "peak": critic_peak})
        self.adamw = torch.optim.AdamW(
            cast("list[dict[str, Any]]", [group for group in groups if group["params"]]),
            lr=peak,
            betas=_BETAS,
            weight_decay=settings.train.weight_decay,
        )

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rates for a step (counted from 0), and return the policy's."""
        train = self.settings
        factor = learning_rate_factor(
            step, schedule=train.schedule, warmup_steps=train.warmup_steps, total_steps=train.max_steps
        )
        for group in self.adamw.param_groups:
            group["lr"] = group["peak"] * factor
        return train.learning_rate * factor

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def clip_gradients(self) -> tuple[Tensor, bool]:
        """Clip policy and critic gradients separately; return the policy's norm before, and whether both are finite."""
        norm = clip_grad_norm(self.policy.values(), self.settings.max_grad_norm)
        finite = torch.isfinite(norm)
        if self.critic:
            finite &= torch.isfinite(clip_grad_norm(self.critic.values(), self.settings.max_grad_norm))
        return norm, bool(finite)

    def step(self) -> None:
        """Apply the gradients."""
        self.adamw.step()

    def state(self) -> dict[str, Tensor]:
        """Return AdamW's tensors by kind and parameter, as `exp_avg.NAME`; moments are sharded like their parameter."""
        return {
            f"{kind}.{name}": value
            for name, parameter in (*self.policy.items(), *self.critic.items())
            for kind, value in self.adamw.state.get(parameter, {}).items()
        }

    def load_state(self, tensors: Mapping[str, Tensor], names: Collection[str], ranks: Ranks) -> None:
        """Set parameters and optimizer state from rank 0's tensors; every rank calls this, and keeps its shard.

        Args:
            tensors: `master.NAME` of every parameter, and the tensors of `state`; rank 0 only.
            names: the names of all these tensors; every rank needs them.
            ranks: the ranks of the trainer.
        """
        self.adamw.state.clear()
        for name, parameter in (*self.policy.items(), *self.critic.items()):
            broadcast_into(parameter, tensors.get(f"master.{name}"), ranks)
            empty = {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}
            state = {
                kind: torch.zeros_like(like, requires_grad=False)
                for kind, like in empty.items()
                if f"{kind}.{name}" in names
            }
            for kind, tensor in state.items():
                broadcast_into(tensor, tensors.get(f"{kind}.{name}"), ranks)
            if state:
                self.adamw.state[parameter] = state


def learning_rate_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Return the factor of the learning rate at a step.

    Args:
        step: optimizer batches done before this one, from 0.
        schedule: `constant`, `linear` or `cosine`; the last two decay from 1 after warm-up to 0 at `total_steps`.
        warmup_steps: steps of linear warm-up; the first step already has factor 1 / warmup_steps.
        total_steps: steps of the whole run; ignored by `constant`.

    Raises:
        ValueError: unknown schedule, or a decay without `total_steps`.

    Example:
        >>> [learning_rate_factor(s, schedule="linear", warmup_steps=2, total_steps=6) for s in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if schedule not in {"constant", "linear", "cosine"}:
        raise ValueError(f"unknown learning-rate schedule {schedule!r}; use constant, linear or cosine")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    if total_steps < 1:
        raise ValueError(f"a {schedule} learning rate must know where it ends; set train.max_steps")
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
