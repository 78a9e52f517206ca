"""Every registered rule, level, shaping and filter equals a naive twin; properties that hold for all of them."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.twins import correction as twins
from workers.train.algorithms.correction import (
    IMPORTANCE_LEVELS,
    REJECTIONS,
    ImportanceWeights,
    Rejection,
    RejectionRule,
    importance_weights,
    reject,
)
from workers.train.algorithms.correction_metrics import correction_metrics
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.pass_at_k import pass_at_k
from workers.train.algorithms.sequences import Sequences, log_ratios
from workers.train.algorithms.shaping import FILTERS, REWARD_SHAPINGS

torch.set_num_threads(1)

JUNK = (math.nan, math.inf, -math.inf, 1e30, -1e30)
# Log-ratios are multiples of 1/64 and bounds are not, so rounding never decides whether a token is within them.
DISTANCES = st.one_of(st.integers(-64, 64).map(lambda n: n / 64), st.sampled_from([100.0, -100.0, 24.0, -21.0]))
BOUNDS = {"k1": (0.8123, 1.2711), "k2": (0.0, 0.0503), "k3": (0.0, 0.0407), "po": (0.0, 0.0703)}
OPTIONS = st.fixed_dictionaries(
    {
        "level": st.sampled_from(sorted(IMPORTANCE_LEVELS)),
        "lower": st.sampled_from([0.0, 0.4951]),
        "upper": st.sampled_from([1.2049, 2.0101, math.inf]),
        "out_of_range": st.sampled_from(["truncate", "zero"]),
        "normalize": st.booleans(),
    }
)
RULES = st.lists(st.sampled_from(sorted(REJECTIONS)), unique=True, max_size=3)
each_rule = pytest.mark.parametrize("name", REJECTIONS)


@dataclass(frozen=True)
class Case:
    """Rows of completions in some order; `None` is a position outside the mask."""

    rows: list[tuple[int, list[tuple[float, float] | None]]]
    width: int

    @property
    def batch(self) -> twins.Batch:
        result: twins.Batch = {}
        for owner, row in self.rows:
            result.setdefault(owner, []).extend(token for token in row if token)
        return {owner: tokens for owner, tokens in result.items() if tokens}

    @property
    def mask(self) -> Tensor:
        return self.sheet([[token is not None for token in row] for _, row in self.rows], False, torch.bool)

    @property
    def ids(self) -> Tensor:
        return torch.tensor([owner for owner, _ in self.rows], dtype=torch.int64)

    def side(self, which: int, outside: float = 0.0) -> Tensor:
        values = [[token[which] if token else outside for token in row] for _, row in self.rows]
        return self.sheet(values, outside, torch.float64)

    def sheet(self, values: list[list[Any]], fill: Any, dtype: torch.dtype) -> Tensor:
        laid = [row + [fill] * (self.width - len(row)) for row in values]
        return torch.tensor(laid, dtype=dtype).reshape(len(self.rows), self.width)

    def laid(self, values_by_owner: dict[int, list[Any]]) -> list[list[Any]]:
        """Arrange a twin's values per completion in the positions of the rows; None elsewhere."""
        rest = {owner: iter(values) for owner, values in values_by_owner.items()}
        return [[next(rest[owner]) if token else None for token in row] for owner, row in self.rows]


@dataclass(frozen=True)
class Found:
    rejection: Rejection
    weights: ImportanceWeights
    metrics: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        tensors = {
            "kept": self.rejection.kept_RT,
            "weights": self.weights.weights_RT,
            "factor": self.weights.normalizer,
        }
        return tensors | {str(n): kept for n, kept in enumerate(self.rejection.kept_by_rule_RT)} | self.metrics


@st.composite
def tokens(draw: st.DrawFn) -> tuple[float, float] | None:
    if draw(st.integers(0, 3)) == 0:
        return None
    rollout = draw(st.integers(-128, 0)) / 64
    return rollout + draw(DISTANCES), rollout


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows: list[tuple[int, list[tuple[float, float] | None]]] = []
    for number in draw(st.lists(st.integers(0, 10**6), unique=True, max_size=4)):
        rows += [(number, row) for row in draw(st.lists(st.lists(tokens(), max_size=4), min_size=1, max_size=3))]
    return Case(draw(st.permutations(rows)), max((len(row) for _, row in rows), default=0) + draw(st.integers(0, 2)))


def rules_of(names: list[str]) -> list[RejectionRule]:
    return [RejectionRule(name, *BOUNDS[name[-2:]]) for name in names]


def run(case: Case, names: list[str], options: dict[str, Any], outside: float = 0.0) -> Found:
    """Run the three steps of the correction as the learner does."""
    train, rollout = case.side(0, outside), case.side(1, outside)
    rejection = reject(rules_of(names), log_ratios(train, rollout, Sequences(case.mask, case.ids)))
    weights = importance_weights(log_ratios(train, rollout, Sequences(rejection.kept_RT, case.ids)), **options)
    metrics = correction_metrics(
        train,
        rollout,
        log_ratios(train, rollout, Sequences(rejection.kept_RT, case.ids)),
        rejection=rejection,
        weights=weights,
    )
    return Found(rejection, weights, metrics)


def near(result: float | Tensor, expected: float, relative: float = 1e-9) -> bool:
    return math.isclose(float(result), expected, rel_tol=relative, abs_tol=relative)


def same(result: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 0.0) -> bool:
    """Compare exactly, or within `relative`; a standard deviation is as exact as the values that it summarises."""

    def size(name: str) -> float:
        family = name.removesuffix("_std")
        return max(abs(float(value)) for other, value in expected.items() if other.startswith(family))

    return result.keys() == expected.keys() and all(
        (torch.equal(result[name], value) if not relative else near(result[name], float(value), relative))
        or (bool(relative) and name.endswith("_std") and abs(float(result[name] - value)) <= relative * size(name))
        for name, value in expected.items()
    )


def test_every_registered_function_has_a_twin() -> None:
    assert set(REJECTIONS) == set(twins.STATISTICS)
    assert set(IMPORTANCE_LEVELS) == set(twins.LEVELS)
    assert set(REWARD_SHAPINGS) == set(twins.SHAPINGS)
    assert set(FILTERS) == set(twins.FILTERS)


@each_rule
@given(cases())
def test_a_rule_keeps_what_its_twin_keeps(name: str, case: Case) -> None:
    (rule,) = rules_of([name])
    result = reject([rule], log_ratios(case.side(0), case.side(1), Sequences(case.mask, case.ids)))
    expected = case.laid(twins.reject(name, case.batch, rule.lower, rule.upper))
    assert (
        result.kept_RT.tolist()
        == case.sheet([[bool(kept) for kept in row] for row in expected], False, torch.bool).tolist()
    )


@given(cases(), RULES)
def test_a_token_must_pass_all_rules(case: Case, names: list[str]) -> None:
    result = reject(rules_of(names), log_ratios(case.side(0), case.side(1), Sequences(case.mask, case.ids)))
    alone = [
        reject([rule], log_ratios(case.side(0), case.side(1), Sequences(case.mask, case.ids))).kept_RT
        for rule in rules_of(names)
    ]
    assert all(torch.equal(a, b) for a, b in zip(result.kept_by_rule_RT, alone, strict=True))
    assert torch.equal(result.kept_RT, torch.stack([case.mask, *alone]).all(dim=0))


@given(cases(), OPTIONS)
def test_weights_equal_their_twins(case: Case, options: dict[str, Any]) -> None:
    result = importance_weights(log_ratios(case.side(0), case.side(1), Sequences(case.mask, case.ids)), **options)
    expected, factor = twins.weights(case.batch, **options)
    laid = case.sheet([[value or 0.0 for value in row] for row in case.laid(expected)], 0.0, torch.float64)
    assert torch.allclose(result.weights_RT, laid, rtol=1e-9, atol=1e-12)
    assert near(result.normalizer, factor)


@given(cases(), RULES, OPTIONS)
def test_metrics_equal_their_twins(case: Case, names: list[str], options: dict[str, Any]) -> None:
    rules = [(rule.name, rule.lower, rule.upper) for rule in rules_of(names)]
    left = twins.surviving(case.batch, *(twins.reject(name, case.batch, lo, up) for name, lo, up in rules))
    expected = twins.policy_metrics(left)
    expected |= twins.rejection_metrics(case.batch, rules) | twins.weight_metrics(left, **options)
    result = run(case, names, options).metrics
    assert result.keys() == expected.keys()
    wrong = {
        name: (float(result[name]), value)
        for name, value in expected.items()
        # A deviation is a difference of values, so its rounding error scales with the largest of them.
        if abs(float(result[name]) - value)
        > 1e-9 * max(1.0, abs(value), expected.get(f"{name.removesuffix('std')}max", 0.0))
    }
    assert not wrong


@given(cases(), RULES, OPTIONS, st.sampled_from(JUNK))
def test_junk_outside_the_mask_changes_nothing(
    case: Case, names: list[str], options: dict[str, Any], junk: float
) -> None:
    assert same(run(case, names, options, junk).tensors, run(case, names, options).tensors)


@given(cases(), RULES, OPTIONS, st.booleans())
def test_a_masked_row_affects_no_other(case: Case, names: list[str], options: dict[str, Any], stranger: bool) -> None:
    owner = 10**7 if stranger or not case.rows else case.rows[0][0]
    more = replace(case, rows=[*case.rows, (owner, [None] * case.width)])
    result, before = run(more, names, options), run(case, names, options)
    assert same(result.metrics, before.metrics, 1e-12)
    assert torch.equal(result.rejection.kept_RT[:-1], before.rejection.kept_RT)
    assert torch.allclose(result.weights.weights_RT[:-1], before.weights.weights_RT, rtol=1e-12, atol=0)
    assert not result.weights.weights_RT[-1].any()


@given(cases(), RULES, OPTIONS, st.randoms(use_true_random=False))
def test_order_names_and_padding_do_not_matter(
    case: Case, names: list[str], options: dict[str, Any], random: Any
) -> None:
    places = random.sample(range(len(case.rows)), len(case.rows))
    moved = Case([(case.rows[place][0] * 7 + 3, case.rows[place][1]) for place in places], case.width + 2)
    result, before = run(moved, names, options), run(case, names, options)
    assert torch.equal(result.rejection.kept_RT[:, : case.width], before.rejection.kept_RT[places])
    assert torch.allclose(
        result.weights.weights_RT[:, : case.width], before.weights.weights_RT[places], rtol=1e-12, atol=0
    )
    assert same(result.metrics, before.metrics, 1e-11)


@given(cases(), RULES, OPTIONS)
def test_splitting_a_completion_into_rows_changes_no_metric(
    case: Case, names: list[str], options: dict[str, Any]
) -> None:
    halves = [(owner, part) for owner, row in case.rows for part in (row[:2], row[2:])]
    assert same(run(replace(case, rows=halves), names, options).metrics, run(case, names, options).metrics, 1e-11)


@given(cases(), OPTIONS)
def test_weights_are_finite_and_bounded(case: Case, options: dict[str, Any]) -> None:
    train = case.side(0).requires_grad_()
    result = importance_weights(log_ratios(train, case.side(1), Sequences(case.mask, case.ids)), **options)
    assert not result.weights_RT.requires_grad
    assert not result.weights_RT[~case.mask].any()
    assert torch.isfinite(result.weights_RT).all()
    tokens = max(int(case.mask.sum()), 1)  # no weight exceeds the sum of all
    bound = tokens if options["normalize"] else min(options["upper"], math.exp(20))
    assert float(result.weights_RT.amax() if result.weights_RT.numel() else 0.0) <= bound * (1 + 1e-9)


@given(cases(), OPTIONS.map(lambda options: options | {"normalize": True}), st.floats(1, 90))
def test_rejected_tokens_are_not_in_the_mean(case: Case, options: dict[str, Any], further: float) -> None:
    """The survivors' weights do not depend on a rejected completion's ratios."""
    before = run(case, ["seq_max_k2"], options)
    lost = {owner for owner, flags in twins.reject("seq_max_k2", case.batch, *BOUNDS["k2"]).items() if not all(flags)}
    moved = [
        (
            owner,
            [
                token and ((token[0] + further if owner in lost and token[0] > token[1] else token[0]), token[1])
                for token in row
            ],
        )
        for owner, row in case.rows
    ]
    after = run(replace(case, rows=moved), ["seq_max_k2"], options)
    assert torch.equal(after.weights.weights_RT, before.weights.weights_RT)
    survivors = before.weights.weights_RT[before.rejection.kept_RT]
    if options["level"] == "token" and survivors.any():
        assert near(survivors.mean(), 1.0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5), st.integers(1, 40))
def test_pass_at_k_equals_binomials(pairs: list[tuple[int, int]], k: int) -> None:
    counts = [(n, min(n, c)) for n, c in pairs]
    result = pass_at_k(*(torch.tensor([pair[side] for pair in counts], dtype=torch.int64) for side in (0, 1)), k)
    for (n, c), value, known in zip(counts, result.value.tolist(), result.known.tolist(), strict=True):
        expected = twins.pass_at_k(n, c, k)
        assert known == (expected is not None)
        assert value == 0.0 if expected is None else near(value, expected, 1e-12)


@dataclass(frozen=True)
class Completion:
    group: int
    valid: bool
    reward: float
    length: int
    cut_short: bool


completions = st.lists(
    st.builds(
        Completion,
        group=st.integers(0, 3),
        valid=st.booleans(),
        reward=st.sampled_from([0.0, 1.0, -1.0, 0.9, 0.25, 37.0]),
        length=st.integers(0, 130),
        cut_short=st.booleans(),
    ),
    max_size=8,
)


def rewards_of(case: list[Completion], outside: float) -> tuple[Tensor, Tensor]:
    valid = torch.tensor([each.valid for each in case], dtype=torch.bool)
    return torch.tensor([each.reward if each.valid else outside for each in case], dtype=torch.float64), valid


@pytest.mark.parametrize("name", REWARD_SHAPINGS)
@given(completions, st.sampled_from(JUNK))
def test_shapings_equal_their_twins_and_omit_invalid_completions(
    name: str, case: list[Completion], junk: float
) -> None:
    options = {"limit": 0.8, "max_length": 100, "tail": 30, "factor": 0.7}
    options = {key: options[key] for key in REWARD_SHAPINGS[name].option_names}
    rewards, valid = rewards_of(case, junk)
    inputs = {
        "rewards_C": rewards,
        "baseline_C": valid,
        "lengths_C": torch.tensor([each.length for each in case], dtype=torch.int64),
        "penalised_C": torch.tensor([each.cut_short for each in case], dtype=torch.bool),
    }
    result = REWARD_SHAPINGS[name](inputs, options)
    expected = [
        twins.SHAPINGS[name](each.reward, each.length, each.cut_short, **options) if each.valid else 0.0
        for each in case
    ]
    assert all(near(value, wanted, 1e-12) for value, wanted in zip(result.tolist(), expected, strict=True))
    assert not result[~valid].any()


@pytest.mark.parametrize("name", FILTERS)
@given(completions, st.sampled_from(JUNK))
def test_filters_equal_their_twins(name: str, case: list[Completion], junk: float) -> None:
    options = {
        "min_valid_rows": 2,
        "min_mean_reward": 0.1,
        "max_mean_reward": 0.9,
        "min_advantage": 0.5,
        "max_advantage": 2.0,
    }
    options = {key: options[key] for key in FILTERS[name].option_names}
    rewards, valid = rewards_of(case, junk)
    groups = Grouping(torch.tensor([each.group for each in case], dtype=torch.int64), valid, 4)
    result = FILTERS[name]({"rewards_C": rewards, "groups": groups, "advantages_C": 2 * rewards}, options)
    for group, kept in enumerate(result.tolist()):
        members = [each.reward for each in case if each.valid and each.group == group]
        assert kept == twins.FILTERS[name](members, [2 * reward for reward in members], **options)
