"""The registry of advantage estimators and the properties that each one declares.

Estimators are defined in `advantages` (one value per completion) and `token_advantages` (one per token); importing
`advantages` registers all of them.
"""

from dataclasses import dataclass
from typing import Final, Literal

from workers.train.algorithms.registry import Registry


@dataclass(frozen=True, slots=True)
class EstimatorTraits:
    """Declared properties of an estimator, which the property tests check."""

    level: Literal["completion", "token"]
    """`completion`: returns float64 (C), one per completion. `token`: returns `TokenAdvantages`."""
    mean_centred: bool = False
    """The advantages of a group's completions in B sum to 0."""
    shift_invariant: bool = False
    """Adding a constant to all rewards of a group changes nothing."""
    scale_invariant: bool = False
    """Multiplying all rewards by a positive number changes nothing, if the estimator divides by the group's standard
    deviation and that is far above epsilon."""
    affine: bool = False
    """Within a group, advantages lie on a straight line over the rewards, so that they are known for the reward 0."""
    within_group: bool = True
    """True if a group's advantages depend on that group only; False if they depend on the batch, on values or on a
    greedy rollout as well."""
    whitened: bool = False
    """Ends in whitening over the batch's tokens, or may (option `whiten`)."""


ESTIMATORS: Final[Registry[EstimatorTraits]] = Registry(
    "estimator",
    {
        "rewards_C": "float64, reward of each completion; anything outside B",
        "groups": "Grouping of the completions; its valid members are B",
        "lengths_C": "int64, tokens of each completion that no rule rejected; anything outside B",
        "loss_lengths_C": "int64, tokens of each completion that bear loss; 0 outside L",
        "parts_PC": "float64, parts of the rewards; anything outside B",
        "has_part_PC": "bool, parts that each completion has; anything outside B",
        "part_weights_P": "float64, weight of each part",
        "correct_C": "bool, completions whose reward reaches the success threshold; anything outside B",
        "token_rewards_CT": "float, reward credited to each token; anything outside the mask",
        "mask_CT": "bool, tokens that count; a completion's tokens in order, tool tokens between them",
        "values_CT": "float, the critic's value before each token; anything outside the mask",
        "bootstrap_C": "float, the critic's value after a truncated end; 0 after a real end",
        "greedy_C": "float, reward of the greedy rollout of each completion's prompt",
        "old_logprobs_CT": "float, log-prob of each token under the policy that is differentiated",
        "sum_pi_squared_CT": "float, sum over the vocabulary of the squared probabilities at each token",
        "weights_CT": "float, importance weights; 1 where there are none",
    },
)
"""Estimators by the name in `[estimator] name`."""
