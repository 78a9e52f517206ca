"""Every registered group filter judges a group only by its completions in B, and never by another group.

test_twins_of_correction shows that each equals a plain loop over groups (P8).
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream.validity import DropReason
from tests.cases.completions import JUNK, VERSION, Made, build, cases, completions, fresh
from tests.cases.inputs import RICH, inputs_of, policy
from tests.cases.options import defaults, drawn, needed, options_of, values_of
from tests.cases.tables import settings_of
from workers.train.algorithms.shaping import FILTERS
from workers.train.step.group_checks import filter_reasons, mask_batch

each = pytest.mark.parametrize("name", FILTERS)
more = st.lists(completions, max_size=4, unique_by=lambda made: made.key)


def kept(name, case, options, junk=0.0, sign=1):
    """Return, by group number, whether each group with a completion is kept."""
    inputs = needed(inputs_of(case, junk, sign=sign), FILTERS[name])
    result = FILTERS[name](inputs, options)
    assert result.dtype == torch.bool
    return {made.group: bool(result[code]) for made, code in zip(case, inputs["groups"].codes_C.tolist(), strict=True)}


@each
@given(case=cases, junk=st.sampled_from(JUNK), data=st.data())
def test_p1_junk_has_no_effect(name, case, junk, data):
    options = data.draw(drawn(FILTERS[name]))
    assert kept(name, case, options) == kept(name, case, options, junk)


@each
@given(case=cases, others=more, junk=st.sampled_from(JUNK), data=st.data())
def test_p2_p4_invalid_completions_have_no_effect(name, case, others, junk, data):
    options = data.draw(drawn(FILTERS[name]))
    valid = [made for made in case if made.voting(policy)]
    alone, whole = kept(name, valid, options), kept(name, case, options, junk)
    assert alone == {group: whole[group] for group in alone}
    bad = [*fresh(others, "dropped"), Made(-1, 7, 1.0, "failed")]
    after = kept(name, [*bad, *case], options, junk)
    assert whole == {group: after[group] for group in whole}


@each
@given(case=cases, source=st.randoms(use_true_random=False), data=st.data())
def test_p3_order_and_ids_of_groups_do_not_matter(name, case, source, data):
    options = data.draw(drawn(FILTERS[name]))
    assert kept(name, case, options) == kept(name, source.sample(case, len(case)), options, sign=-1)


@each
@given(case=cases, data=st.data())
def test_p7_a_group_is_checked_independently_of_other_groups(name, case, data):
    options = data.draw(drawn(FILTERS[name]))
    whole = kept(name, case, options)
    for group in whole:
        assert kept(name, [made for made in case if made.group == group], options) == {group: whole[group]}


@pytest.mark.parametrize(("name", "option"), options_of(FILTERS))
def test_p18_every_option_has_an_effect(name, option):
    case = [*RICH, Made(key=7, group=5, reward=0.0), Made(key=8, group=6, reward=8.0), Made(key=9, group=6, reward=8.0)]
    usual = defaults(FILTERS[name])
    results = [kept(name, case, usual | {option: value}) for value in values_of(option)]
    assert not any(results[0] == other for other in results[1:])


def test_these_tests_make_every_input_of_the_registry():
    assert set(FILTERS.inputs) <= set(inputs_of(RICH)), "add what is missing to tests/cases/inputs.py"


ESTIMATING: dict[str, dict] = {
    "min_advantage": {"advantage_range": [0.5, 1e9]},
    "max_advantage": {"advantage_range": [0.0, 0.5]},
}
CHOSEN = {
    "none": {"min_valid_rows": 1, "zero_variance": False},
    "min_valid_rows": {"min_valid_rows": 3},
    "zero_variance": {"min_valid_rows": 1, "zero_variance": True},
    "difficulty": {"min_valid_rows": 1, "zero_variance": False, "mean_reward_range": [0.25, 1.5]},
    **{name: {"min_valid_rows": 1, "zero_variance": False, **table} for name, table in ESTIMATING.items()},
}
SETTINGS = {
    name: settings_of({"filter": table, "algorithm": {"truncation": {"max_turns": "zero_reward_in_baseline"}}})
    for name, table in CHOSEN.items()
}


@pytest.mark.parametrize("name", CHOSEN)
@given(case=cases, others=more)
def test_p4_drop_reasons_do_not_depend_on_invalid_completions(name, case, others):
    def reasons(case):
        batch = build(case)
        result = filter_reasons(batch, mask_batch(batch, SETTINGS[name], VERSION), SETTINGS[name])
        return {made.group: result[made.group] for made in case}

    before, after = reasons(case), reasons([*case, *fresh(others, "dropped")])
    assert before == {group: after[group] for group in before}


@given(case=cases)
def test_groups_without_signal_are_found_from_completions_in_b_only(case):
    case = [replace(made, stale=()) for made in case]
    batch, settings = build(case), SETTINGS["zero_variance"]
    result = filter_reasons(batch, mask_batch(batch, settings, VERSION), settings)
    for group, reason in enumerate(result):
        voting = [made for made in case if made.group == group and made.voting(settings.truncation_policy)]
        values = [0.0 if made.state == "max_turns" else made.reward for made in voting]
        if not values:
            assert reason is DropReason.NO_VALID_ROW
        elif len(values) > 1 and len(set(values)) == 1:
            assert reason is DropReason.ZERO_VARIANCE
        else:
            assert reason is None
