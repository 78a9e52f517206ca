"""Advantage estimators: how much better than its siblings a completion was.

Each is one pure function of rewards, group ids and the baseline mask, checkable against its formula in one look, and
registered with what it declares of itself: its source, and the invariants that property tests hold it to. Keyword-only
parameters are an estimator's options; they bear the names of the settings in `[algorithm]`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from workers.train.grouping import Grouping


@dataclass(frozen=True, slots=True)
class Estimator:
    """A registered estimator and what it declares of itself."""

    name: str
    function: Callable[..., Tensor]
    formula: str
    source: str
    mean_centred: bool
    """The advantages of a group's completions in B sum to 0."""
    shift_invariant: bool
    """Adding a number to all rewards of a group changes nothing."""
    scale_invariant: bool
    """Multiplying them by a positive number changes nothing, where it divides by the standard deviation."""
    options: tuple[str, ...]
    """Names of its keyword-only parameters."""

    def __call__(
        self,
        rewards_C: Tensor,
        group_ids_C: Tensor,
        baseline_C: Tensor,
        settings: Mapping[str, Any],
    ) -> Tensor:
        """Estimate with the options picked from `settings` by name."""
        return self.function(
            rewards_C, group_ids_C, baseline_C, **{name: settings[name] for name in self.options if name in settings}
        )


ESTIMATORS: Final[dict[str, Estimator]] = {}
"""By name, as `[algorithm] estimator` says it."""


def estimator(
    name: str,
    *,
    formula: str,
    source: str,
    mean_centred: bool,
    shift_invariant: bool,
    scale_invariant: bool,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register an estimator under a name; see `Estimator` for what is declared."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if name in ESTIMATORS:
            raise ValueError(f"an estimator named {name!r} is registered already")
        parameters = inspect.signature(function).parameters.values()
        ESTIMATORS[name] = Estimator(
            name=name,
            function=function,
            formula=formula,
            source=source,
            mean_centred=mean_centred,
            shift_invariant=shift_invariant,
            scale_invariant=scale_invariant,
            options=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
        )
        return function

    return register


@estimator(
    "grpo",
    formula="(r - mean) / (std + eps), or r - mean",
    source="Shao et al. 2024, arXiv:2402.03300, section 4.1; without std: Liu et al. 2025, arXiv:2503.20783",
    mean_centred=True,
    shift_invariant=True,
    scale_invariant=True,
)
def grpo(
    rewards_C: Tensor,
    group_ids_C: Tensor,
    baseline_C: Tensor,
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
    singleton: str = "zero",
) -> Tensor:
    """Group-relative advantage: A = (r - mean) / (std + epsilon) over the completions of B in the same group.

    Args:
        rewards_C: rewards; what stands outside of B is never looked at.
        group_ids_C: integer ids.
        baseline_C: bool, B.
        normalize_std: divide by the sample standard deviation (n - 1); else A = r - mean.
        epsilon: added to the standard deviation.
        singleton: a group with one completion in B gets 0 (`zero`, `drop`), or its own reward (`raw`).

    Returns:
        float64, one for each completion: exactly 0.0 outside of B and where all rewards of B in the group are equal.
    """
    groups = Grouping(group_ids_C, baseline_C)
    rewards = torch.where(baseline_C, rewards_C.double(), 0.0)
    advantages = rewards - groups.spread(groups.mean(rewards))
    if normalize_std:
        variance_G = groups.sum(advantages.square()) / (groups.count_G - 1).clamp(min=1)
        advantages = advantages / (groups.spread(variance_G.sqrt()) + epsilon)
    advantages = torch.where(baseline_C & ~groups.spread(groups.tied(rewards)), advantages, 0.0)
    if singleton == "raw":
        advantages = torch.where(baseline_C & groups.spread(groups.count_G == 1), rewards, advantages)
    return advantages
