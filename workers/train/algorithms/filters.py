"""Group filters: which groups are worth training on.

Filters look at B, after the truncation policy and before reward shaping. All except `min_valid_rows` keep a group
without a completion in B, which is dropped for that reason before. The name of a filter is the reason that is counted.
"""

from torch import Tensor

from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.registry import Registry
from workers.train.algorithms.rounding import tolerant_difference

FILTERS: Registry[None] = Registry(
    "group filter",
    {
        "rewards_C": "float64, after the truncation policy; anything outside B",
        "groups": "Grouping over B",
        "advantages_C": "float64; anything outside B",
    },
)
"""Filters by name. Each returns bool (G), the groups that it keeps."""


@FILTERS.register("min_valid_rows", None, formula="keep where n >= min_valid_rows", source="validity contract")
def min_valid_rows(groups: Grouping, *, min_valid_rows: int) -> Tensor:
    """Keep groups with at least this many completions in B; with only two, GRPO always gives ±0.707."""
    return groups.count_G >= min_valid_rows


@FILTERS.register(
    "zero_variance",
    None,
    formula="keep where n < 2, or not all r are equal",
    source="Yu et al. 2025, DAPO, arXiv:2503.14476, dynamic sampling",
)
def zero_variance(rewards_C: Tensor, groups: Grouping) -> Tensor:
    """Keep groups whose rewards differ, compared exactly; a single completion is left to `single_sample_policy`."""
    return (groups.count_G < 2) | ~groups.tied(rewards_C)


@FILTERS.register(
    "difficulty",
    None,
    formula="keep where min_mean_reward <= mean r <= max_mean_reward",
    source="AReaL docs, should_accept_fn",
)
def difficulty(rewards_C: Tensor, groups: Grouping, *, min_mean_reward: float, max_mean_reward: float) -> Tensor:
    """Keep groups neither too hard nor too easy; the bounds are inclusive."""
    return _within(groups.mean(rewards_C), groups, min_mean_reward, max_mean_reward)


@FILTERS.register(
    "advantage_bounds",
    None,
    formula="keep where min_advantage <= max |A| <= max_advantage",
    source="validity contract",
)
def advantage_bounds(advantages_C: Tensor, groups: Grouping, *, min_advantage: float, max_advantage: float) -> Tensor:
    """Keep groups whose largest absolute advantage lies within the bounds, inclusive."""
    return _within(groups.max(advantages_C.abs()), groups, min_advantage, max_advantage)


def _within(values_G: Tensor, groups: Grouping, lower: float, upper: float) -> Tensor:
    """Return groups within the bounds, which are inclusive up to rounding; empty groups count as within."""
    over, under = (tolerant_difference(values_G, values_G.new_tensor(bound)) for bound in (lower, upper))
    return (groups.count_G == 0) | ((over >= 0) & (under <= 0))
