"""However a rollout branched: the same loss tokens weigh the same, and discarded branches are as if never sampled."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream.records import Branch, BranchRole, DiscardReason
from tests.cases.branches import Line, Tree, batch_of, compute, in_rows, records, trees
from tests.cases.completions import VERSION, VOCABULARY
from tests.cases.path import close
from tests.cases.tables import LEAST, Table
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.aggregation import AGGREGATIONS
from workers.train.step.batch import ForwardStatistics
from workers.train.step.group_checks import mask_batch
from workers.train.step.prepared_batch import prepare

each_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)
each_weight = pytest.mark.parametrize("weight", ["rollout", "tokens"])
MAIN, SUB = BranchRole.MAIN, BranchRole.SUB


def settings_of(aggregation="token-mean", weight="rollout", **sections):
    algorithm = {"aggregation": aggregation, **sections.pop("algorithm", {})}
    return parse_settings(LEAST | {"agents": {"weight": weight}, "algorithm": algorithm} | sections)


TERMS: dict[str, Table] = {
    "policy loss": {},
    "reference and entropy": {"algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.05}},
    "critic": {"estimator": {"name": "gae"}},
    "sequence ratios": {"loss": {"name": "clipped", "level": "sequence"}},
    "weights and rejection": {
        "correction": {"weights": "token", "weight_range": [0.3, 1.7], "reject": {"seq_mean_k2": [0.0, 30.0]}},
    },
}


def assert_equal_training(one, other):
    assert len(one.losses) == len(other.losses) == 2
    for left, right in zip([*one.losses, *one.gradients], [*other.losses, *other.gradients], strict=True):
        assert close(left, right), (left, right)


FIFTY = [(7 * place + place // 9) % VOCABULARY for place in range(50)]
CUTS = {1: [0, 50], 2: [0, 20, 50], 7: [0, 1, 3, 10, 11, 30, 42, 50], 50: [*range(51)]}
"""Where rows begin, by their number."""


def fifty_tokens(number, *, branched):
    """Return a group in which one completion has 50 loss tokens in this number of rows, each of them a main branch."""
    rows = range(number)
    branches = [Branch(role=MAIN, rows=(row,), parent=row - 1 if row else None) for row in rows] if branched else []
    whole = in_rows(0, 1.0, FIFTY, CUTS[number], branches=branches)
    return [(0, whole), (0, in_rows(1, 0.0, [3, 1, 4, 1, 5], [0, 5])), (0, in_rows(2, 0.25, [2, 7], [0, 2]))]


@each_aggregation
@each_weight
@pytest.mark.parametrize("terms", TERMS)
def test_the_same_loss_tokens_give_the_same_loss_in_any_number_of_rows(aggregation, weight, terms):
    settings = settings_of(aggregation, weight, **TERMS[terms])
    one = compute(fifty_tokens(1, branched=False), settings)
    assert one.metrics["tokens/loss"] == 57
    assert all(loss.abs() > 1e-3 for loss in one.losses)
    for number in (2, 7, 50):
        for branched in (False, True):
            assert_equal_training(compute(fifty_tokens(number, branched=branched), settings), one)
    assert_equal_training(compute(fifty_tokens(50, branched=True), settings, alone=True), one)


def total_weights(completions, settings):
    """Return the sum of the loss factors of each completion's tokens, which are never negative, in float64."""
    batch = batch_of(completions)

    def zeros(batch, mask_RT):
        zeros_RT = torch.zeros(mask_RT.shape, dtype=torch.float64)
        return ForwardStatistics(
            old_logprobs_RT=zeros_RT, sum_pi_squared_RT=zeros_RT, values_RT=zeros_RT, end_values_R=zeros_RT[:, 0]
        )

    prepared = prepare(batch, settings, VERSION, compute_statistics=zeros, seed=0)
    factors_R = prepared.loss_weights.row_factors_R * prepared.masks.loss_tokens_RT.sum(dim=1)
    assert (factors_R >= 0).all()
    return torch.zeros(len(completions), dtype=torch.float64).index_add(0, batch.completion_ids_R, factors_R)


def rollouts(*subs):
    """Return a group of completions with 6 and 2 main tokens in turn, and these numbers of sub-branches of 3 tokens."""
    many = [
        Tree(key, (Line(rows=(4, 2) if key % 2 == 0 else (2,)), *[Line(SUB)] * count), reward=float(key % 2))
        for key, count in enumerate(subs)
    ]
    return records(many)


BY_HAND = {
    "token-mean": [6 / 14, 2 / 14, 6 / 14],
    "token-sum": [6.0, 2.0, 6.0],
    "seq-mean-token-mean": [1 / 3, 1 / 3, 1 / 3],
    "seq-mean-token-sum": [6 / 3, 2 / 3, 6 / 3],
    "seq-mean-token-sum-norm": [6 / 36, 2 / 36, 6 / 36],
}
"""Total weights of three rollouts with 6, 2 and 6 main tokens; `rollout.max_tokens` is 12."""


@each_aggregation
def test_a_rollout_has_the_same_total_weight_with_0_1_and_8_sub_branches(aggregation):
    """Its total weight is the sum of the absolute factors of its loss tokens: that of its main tokens alone."""
    settings = settings_of(aggregation)
    expected = torch.tensor(BY_HAND[aggregation], dtype=torch.float64)
    for subs in ([0, 0, 0], [1, 0, 0], [8, 0, 0], [8, 1, 0], [0, 8, 8], [8, 8, 1]):
        assert close(total_weights(rollouts(*subs), settings), expected), subs


@each_aggregation
def test_by_tokens_a_rollout_weighs_more_with_more_branches_unless_its_mean_counts(aggregation):
    settings = settings_of(aggregation, "tokens")
    none, eight = (total_weights(rollouts(*subs), settings) for subs in ([0, 0, 0], [8, 0, 0]))
    assert close(none, torch.tensor(BY_HAND[aggregation], dtype=torch.float64))
    assert (eight[0] / eight[1]).item() == pytest.approx(1.0 if aggregation == "seq-mean-token-mean" else 30 / 2)


@each_aggregation
@given(case=trees)
def test_total_weights_are_those_of_the_main_tokens(aggregation, case):
    by_group = sorted(case, key=lambda tree: tree.group)
    kept = [[line for _, line in tree.without_discarded()] for tree in by_group]
    of_main = [sum(sum(line.rows) for line in tree if line.role is MAIN) for tree in kept]
    average = [sum(sum(line.rows) for line in tree) / max(len(tree), 1) for tree in kept]
    tokens = [main or mean for main, mean in zip(of_main, average, strict=True)]
    number = max(1, sum(map(bool, tokens)))
    expected = {
        "token-mean": [each / max(1, sum(tokens)) for each in tokens],
        "token-sum": tokens,
        "seq-mean-token-mean": [bool(each) / number for each in tokens],
        "seq-mean-token-sum": [each / number for each in tokens],
        "seq-mean-token-sum-norm": [each / number / 12 for each in tokens],
    }[aggregation]
    result = total_weights(records(case), settings_of(aggregation))
    assert close(result, torch.tensor(expected, dtype=torch.float64))


WAYS: dict[str, Table] = {
    **TERMS,
    "gspo": {"loss": {"name": "gspo"}},
    "rejection": {"correction": {"reject": {"token_k2": [0.0, 1.0], "seq_mean_k2": [0.0, 2.0]}}},
    "opo": {"estimator": {"name": "opo"}},
    "whitened over tokens": {"estimator": {"name": "reinforce_plus_plus"}, "algorithm": {"reward_clip": 2.0}},
    "normalised over tokens": {"algorithm": {"advantage_normalization": ["group", "batch"]}},
    "sequence weights": {"correction": {"weights": "sequence", "weight_range": [0.0, 1.7]}},
    "normalised weights": {"correction": {"weights": "token-normalized", "reject": {"m2po": [0.0, 1.5]}}},
    "overlong": {"algorithm": {"overlong_penalty": [11, 1.0]}},
    "penalty by covariance": {"loss": {"name": "clip_cov", "clip_cov_low": -0.5, "clip_cov_ratio": 1.0}},
}
NOT_OF_LOSS_TOKENS = ("length/", "turns/", "branches/", "tokens/branch_", "tokens/sampled", "tokens/too_old")
NOT_OF_LOSS_TOKENS += ("tokens/not_finite", "rows/rejected")
"""Metrics that count sampled tokens and turns, whether they bear loss or not, and why completions bear none."""


@pytest.mark.parametrize("way", WAYS)
@each_weight
@given(case=trees, data=st.data())
def test_discarded_rows_are_as_if_they_had_never_been(way, weight, case, data):
    aggregation = "auto" if way == "gspo" else data.draw(st.sampled_from(sorted(AGGREGATIONS)))
    settings = settings_of(aggregation, weight, **WAYS[way])
    one, other = (compute(records(case, discarded=discarded), settings) for discarded in (True, False))
    assert_equal_training(one, other)
    assert close(one.values, other.values)
    assert close(one.advantages.values_C, other.advantages.values_C)
    for left, right in ((one.metrics, other.metrics), (other.metrics, one.metrics)):
        for name, value in left.items():
            if not name.startswith(NOT_OF_LOSS_TOKENS):
                assert right[name] == pytest.approx(value, rel=1e-9, abs=1e-10), name


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "gpg", "passk", "max_rl"])
@given(case=trees)
def test_group_statistics_are_those_of_completions_that_never_branched(estimator, case):
    """One completion has one reward: advantages are equal bit by bit to those of one row each, or none."""
    settings = settings_of(estimator={"name": estimator})
    plain = [replace(tree, lines=tuple(line for _, line in tree.without_discarded()[:1])) for tree in case]
    one, other = compute(records(case), settings), compute(records(plain, branched=False), settings)
    for name in ("baseline_C", "loss_C", "rewards_C"):
        assert torch.equal(getattr(one.masks, name), getattr(other.masks, name)), name
    assert torch.equal(one.advantages.values_C, other.advantages.values_C)
    figures = ("reward/", "pass@", "groups/", "advantage/", "trained/", "rows/valid", "valid_fraction")
    assert [(n, v) for n, v in one.metrics.items() if n.startswith(figures)] == [
        (n, v) for n, v in other.metrics.items() if n.startswith(figures)
    ]


@given(case=trees)
def test_every_sampled_token_of_a_measured_completion_is_trained_or_discarded_for_a_reason(case):
    completions = records(case)
    batch = batch_of(completions)
    masks = mask_batch(batch, settings_of(), VERSION)
    tokens_R = batch.sampled_RT.sum(dim=1)
    for place, (_, completion) in enumerate(completions):
        rows_R = batch.completion_ids_R == place
        sampled = int(tokens_R[rows_R].sum())
        trained = int(masks.loss_tokens_RT[rows_R].sum())
        discarded = dict.fromkeys(DiscardReason, 0)
        for branch in completion.branches:
            if branch.discarded is not None:
                discarded[branch.discarded] += sum(completion.rows[row].sampled_count for row in branch.rows)
        assert sampled == trained + sum(discarded.values())
        codes_RT = masks.token_rejected_by_RT[rows_R]
        for reason, count in discarded.items():
            name = f"branch_{reason}"
            found = int((codes_RT == masks.rules.index(name)).sum()) if name in masks.rules else 0
            assert found == count
