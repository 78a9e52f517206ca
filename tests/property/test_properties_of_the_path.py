"""Invalid data has no effect, from the facts of a batch to every parameter's gradient and every metric.

The tables of settings together name every estimator, loss, aggregation, divergence, importance level, rejection rule,
shaping and normaliser (`tests.cases.tables`). P1 ... are the invariants of the validity contract.
"""

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.cases.completions import JUNK, Made, build, cases, completions, fresh, interleaved
from tests.cases.inputs import RICH
from tests.cases.path import assert_same, evaluate
from tests.cases.tables import ALL, EVERYTHING, SOME, TABLES, choosing, missing, settings_of
from workers.train.algorithms.advantages import ESTIMATORS

each_table = pytest.mark.parametrize("table", TABLES, ids=[" ".join(name.split()[:2]) for name in TABLES])
SETTINGS = {
    (name, len(number)): settings_of(choosing(table, chosen))
    for name, table in TABLES.items()
    for number, chosen in (("some", SOME), ("every", ALL))
}


def some(table):
    """Return the table's settings; a selector takes some of its candidates."""
    return SETTINGS[table, 4]


def every(table):
    """Return the table's settings; a selector takes all of its candidates."""
    return SETTINGS[table, 5]


def test_every_registered_function_is_in_a_table():
    assert missing() == [], "add what is named here to tests/cases/tables.py"
    named = " ".join(TABLES)
    assert [name for name in EVERYTHING if name not in named] == []


@each_table
def test_every_table_trains_on_valid_completions(table):
    """Check that there is something to train on, so that no property below holds vacuously."""
    result = evaluate(RICH, build(RICH), some(table))
    assert result.masks.loss_C.sum() > len(RICH) / 3
    assert any(gradient.abs().max() > 1e-6 for gradient in result.gradients)
    assert (result.tokens != 0).any()


@each_table
@given(case=cases, junk=st.sampled_from(JUNK))
def test_p1_junk_in_invalid_places_changes_no_bit(table, case, junk):
    batch, settings = build(case), some(table)
    clean, dirty = evaluate(case, batch, settings), evaluate(case, batch, settings, junk=junk)
    assert_same(clean, dirty, exactly=True)
    assert (dirty.advantages.values_C[~dirty.masks.used_C] == 0).all()
    assert clean.masks.loss_tokens_RT.equal(dirty.masks.loss_tokens_RT)


@each_table
@given(case=cases)
def test_p2_valid_completions_alone_give_the_same_result(table, case):
    settings = every(table)
    valid = [made for made in case if made.used(settings.truncation_policy)]
    assume(valid)
    assert_same(evaluate(case, build(case), settings), evaluate(valid, build(valid), settings))


@each_table
@given(case=cases, source=st.randoms(use_true_random=False))
def test_p3_order_of_completions_and_rows_and_ids_of_groups_do_not_matter(table, case, source):
    settings, names = every(table), source.sample(range(9), 9)
    moved = source.sample(case, len(case))
    before = evaluate(case, build(case), settings)
    batch = build(moved, codes=dict(enumerate(names)), rows=interleaved(moved, source))
    assert_same(before, evaluate(moved, batch, settings))


@each_table
@given(case=cases, others=st.lists(completions, max_size=4, unique_by=lambda made: made.key), at=st.integers(0, 9))
def test_p4_padding_rows_invalid_completions_and_invalid_groups_change_nothing(table, case, others, at):
    settings = every(table)
    bad = fresh(others, "dropped") + fresh(
        [Made(1, 7, 1.0, "failed"), Made(2, 7, 0.0, "no_row"), Made(3, 7, 8.0, "unmeasured")]
    )
    more = [*case[:at], *[replace(made, key=made.key + 10) for made in bad], *case[at:]]
    assert_same(evaluate(case, build(case), settings), evaluate(more, build(more), settings))


@each_table
@given(case=cases, width=st.integers(1, 9))
def test_p10_padding_of_any_width_changes_nothing(table, case, width):
    settings = some(table)
    assert_same(evaluate(case, build(case), settings), evaluate(case, build(case, width=width), settings))


def uncut(case, settings):
    """Return the case; for an estimator that uses the value of a final state, without truncated completions."""
    if "bootstrap_C" not in ESTIMATORS[settings.estimator.name].input_names:
        return case
    return [replace(made, state="ok") if made.truncated else made for made in case]


@each_table
@given(case=cases, tail=st.integers(1, 5))
def test_p12_tool_tokens_at_the_end_change_nothing(table, case, tail):
    settings = some(table)
    # A critic values the state in which a completion was truncated, which includes the tool tokens.
    case = uncut(case, settings)
    longer = [replace(made, tail=tail) for made in case]
    assert_same(evaluate(case, build(case), settings), evaluate(longer, build(longer), settings))


@each_table
@given(case=cases, source=st.randoms(use_true_random=False))
def test_p13_every_partition_of_the_completions_gives_the_same_result(table, case, source):
    settings, batch = some(table), build(case)
    place = {c: source.randrange(4) for c in range(len(case))}

    def split(rows):
        owners = batch.completion_ids_R[rows].tolist()
        return [rows[torch.tensor([place[c] == part for c in owners], dtype=torch.bool)] for part in range(4)]

    assert_same(evaluate(case, batch, settings), evaluate(case, batch, settings, split=split))


FORKED = [Made(1, 0, 1.0, turns=(2, 2), forked=True), Made(2, 0, 0.0, turns=(4,)), Made(3, 0, 0.5, turns=(3,))]


def of_any_length(settings):
    """Return the same settings without a length penalty."""
    truncation = {
        reason: "keep" if policy == "penalty" else policy for reason, policy in settings.algorithm.truncation.items()
    }
    algorithm = msgspec.structs.replace(settings.algorithm, truncation=truncation, overlong_penalty=(0, 1.0))
    return msgspec.structs.replace(settings, algorithm=algorithm)


@each_table
@example(case=FORKED, which=0, how="too_old", junk=math.nan)
@example(case=FORKED, which=1, how="not_finite", junk=math.nan)
@given(case=cases, which=st.integers(0, 8), how=st.sampled_from(["not_finite", "too_old"]), junk=st.sampled_from(JUNK))
def test_p14_rejecting_a_row_equals_removing_it(table, case, which, how, junk):
    settings, batch = some(table), build(case)
    assume(which < len(batch.lengths_R))
    owner = int(batch.completion_ids_R[which])
    made, part = case[owner], int((batch.completion_ids_R[:which] == owner).sum())
    several = made.forked and len(made.turns) > 1
    # Under `baseline_only` a completion bears no loss, so whether its log-probs are finite has no effect (P1).
    assume(made.truncated is None or settings.truncation_policy(made.truncated) != "baseline_only")
    if several and settings.algorithm.overlong_penalty[0]:
        # The length of a completion is a fact: it includes rows that are not trained.
        settings = of_any_length(settings)
    sampled = batch.sampled_RT[which]
    if how == "not_finite":
        behaviour = batch.rollout_logprobs_RT.clone()
        behaviour[which][sampled] = math.nan
        rejected = replace(batch, rollout_logprobs_RT=behaviour)
    else:
        versions, behaviour = batch.versions_RT.clone(), batch.rollout_logprobs_RT.clone()
        versions[which][sampled] = 0
        behaviour[which][sampled] = junk
        rejected = replace(batch, versions_RT=versions, rollout_logprobs_RT=behaviour)
    left = replace(made, absent=(part,)) if several else replace(made, state="no_row")
    never = [left if c == owner else other for c, other in enumerate(case)]
    assert_same(
        _without_lengths(evaluate(case, rejected, settings)), _without_lengths(evaluate(never, build(never), settings))
    )


def _without_lengths(result):
    """Remove metrics of what was sampled: they are facts, which the loss path does not change."""
    kept = {
        name: value for name, value in result.metrics.items() if not name.startswith(("length/", "truncated/length"))
    }
    return replace(result, metrics=kept)


@each_table
@given(case=cases)
def test_p19_splitting_a_completion_into_rows_changes_nothing(table, case):
    settings = some(table)
    if settings.estimator.name == "optimal_token_baseline":
        # The estimator counts positions, including tool tokens and rejected tokens; there are none between two rows,
        # nor in a row whose tokens are all rejected (P14).
        case = [replace(made, gap=0, stale=()) for made in case]
    # A critic values the state at the end of a row, including rejected tokens, if any token of the row is left (P14).
    case = uncut(case, settings)
    whole, split = ([replace(made, forked=forked) for made in case] for forked in (False, True))
    assert_same(evaluate(whole, build(whole), settings), evaluate(split, build(split), settings))
