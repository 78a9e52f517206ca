"""The optimizer: AdamW over what is trained and the critic beside it, its rates, and its state as tensors by name."""

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from workers.settings import Settings
from workers.settings.estimators import Gae
from workers.train.algorithms.schedule import learning_rate_factor
from workers.train.distributed.ranks import Ranks
from workers.train.distributed.sharding import broadcast_into, clip_grad_norm

_BETAS = (0.9, 0.95)


class Optimizer:
    """AdamW; matrices of the policy decay, gains, biases and the critic do not.

    Args:
        policy: parameters that are trained, by name.
        critic: the critic's; none where there is none.
        settings: of the run.
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

    def set_learning_rate(self, step: int, total_steps: int) -> float:
        """Set the learning rates of a step, counted from 0; returns the policy's."""
        train = self.settings
        now = learning_rate_factor(
            step, schedule=train.schedule, warmup_steps=train.warmup_steps, total_steps=total_steps
        )
        for group in self.adamw.param_groups:
            group["lr"] = group["peak"] * now
        return train.learning_rate * now

    def zero_grad(self) -> None:
        """Forget gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def clip_gradients(self) -> tuple[Tensor, bool]:
        """Bound gradients, the critic's by themselves; the norm that the policy's had, and whether all are finite."""
        norm = clip_grad_norm(self.policy.values(), self.settings.max_grad_norm)
        sound = torch.isfinite(norm)
        if self.critic:
            sound &= torch.isfinite(clip_grad_norm(self.critic.values(), self.settings.max_grad_norm))
        return norm, bool(sound)

    def step(self) -> None:
        """One step along the gradients."""
        self.adamw.step()

    def state(self) -> dict[str, Tensor]:
        """Its tensors by kind and parameter, `exp_avg.NAME`; sharded where the parameter is."""
        return {
            f"{kind}.{name}": value
            for name, parameter in (*self.policy.items(), *self.critic.items())
            for kind, value in self.adamw.state.get(parameter, {}).items()
        }

    def load_state(self, tensors: Mapping[str, Tensor], names: Collection[str], ranks: Ranks) -> None:
        """Set parameters and state, at every rank its part of them.

        Args:
            tensors: `master.NAME` of every parameter, and what `state` gave; at the first rank.
            names: of these, at every rank.
            ranks: all of them call this.
        """
        self.adamw.state.clear()
        for name, parameter in (*self.policy.items(), *self.critic.items()):
            broadcast_into(parameter, tensors.get(f"master.{name}"), ranks)
            empty = {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}
            found = {
                kind: torch.zeros_like(like, requires_grad=False)
                for kind, like in empty.items()
                if f"{kind}.{name}" in names
            }
            for kind, tensor in found.items():
                broadcast_into(tensor, tensors.get(f"{kind}.{name}"), ranks)
            if found:
                self.adamw.state[parameter] = found
