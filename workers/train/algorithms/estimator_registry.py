"""The registry of advantage estimators, and what each one declares of itself.

The estimators stand in `advantages` (one value to a completion) and `token_advantages` (one to a token); import
`advantages` to have them all.
"""

from dataclasses import dataclass
from typing import Final, Literal

from workers.train.algorithms.registry import Registry


@dataclass(frozen=True, slots=True)
class EstimatorTraits:
    """What property tests hold an estimator to."""

    level: Literal["completion", "token"]
    """`completion`: float64 (C), spread over the completion's tokens. `token`: `TokenAdvantages` on a sheet (C, T)."""
    mean_centred: bool = False
    """The advantages of a group's completions in B sum to 0."""
    shift_invariant: bool = False
    """Adding a number to all rewards of a group changes nothing."""
    scale_invariant: bool = False
    """Multiplying all rewards by a positive number changes nothing, where it divides by the group's standard deviation
    and that is far above epsilon."""
    within_group: bool = True
    """Compares with siblings alone, so that a group can be judged by itself; else with the batch, values or a greedy
    rollout as well."""
    whitened: bool = False
    """Ends in whitening over the batch's tokens, or may (option `whiten`)."""


ESTIMATORS: Final[Registry[EstimatorTraits]] = Registry(
    "estimator",
    {
        "rewards_C": "float64, reward of each completion; anything outside of B",
        "groups": "Grouping of the completions; its valid members are B",
        "lengths_C": "int64, tokens of each completion that no rule rejected; anything outside of B",
        "loss_lengths_C": "int64, the same of those that bear loss; 0 outside of L",
        "parts_PC": "float64, parts of the rewards; anything outside of B",
        "part_weights_P": "float64, weight of each part",
        "correct_C": "bool, completions whose reward is at least `algorithm.success_threshold`; anything outside of B",
        "token_rewards_CT": "float, reward credited to each token; anything outside of the mask",
        "mask_CT": "bool, tokens that count; a completion's tokens in order, tool tokens between them",
        "values_CT": "float, the critic's value before each token; anything outside of the mask",
        "bootstrap_C": "float, the critic's value after a truncated end; 0 where the end is a real one",
        "greedy_C": "float, reward of the greedy rollout of each completion's prompt",
        "old_logprobs_CT": "float, log-prob of each token under the policy that is differentiated",
        "sum_pi_squared_CT": "float, sum over the vocabulary of the squared probabilities at each token",
        "weights_CT": "float, importance weights; 1 where there are none",
    },
)
"""By name, as `[estimator] name` says it."""
