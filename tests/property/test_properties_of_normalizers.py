"""Every registered normaliser and shaping uses measured values only.

test_twins_of_advantages and test_twins_of_correction show that each equals a plain loop (P8).
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.answers import by_key, same
from tests.cases.completions import JUNK, Made, cases, completions, fresh
from tests.cases.inputs import RICH, inputs_of, policy
from tests.cases.options import defaults, drawn, needed, options_of, values_of
from workers.train.algorithms.normalization import NORMALIZERS
from workers.train.algorithms.shaping import REWARD_SHAPINGS

REGISTERED = {**NORMALIZERS, **REWARD_SHAPINGS}
each = pytest.mark.parametrize("name", REGISTERED)
each_normaliser = pytest.mark.parametrize("name", NORMALIZERS)
more = st.lists(completions, max_size=4, unique_by=lambda made: made.key)


def answer(name, case, options, junk=0.0, inputs=None, **how):
    """Return values of completions in B or tokens of L, sorted by key; check that all others are exactly 0."""
    registered = REGISTERED[name]
    inputs = needed(inputs or inputs_of(case, junk, **how), registered)
    result = registered(inputs, options)
    assert result.dtype == torch.float64
    if name == "whiten":
        # A value of weight 0 has no vote, but is whitened.
        return by_key(case, result, inputs["mask"])
    return by_key(case, result, inputs["mask_RT"] if "mask_RT" in registered.input_names else inputs["baseline_C"])


def test_no_name_belongs_to_two_registries():
    assert not set(NORMALIZERS) & set(REWARD_SHAPINGS)


@each
@given(case=cases, junk=st.sampled_from(JUNK), data=st.data())
def test_p1_junk_changes_no_bit(name, case, junk, data):
    options = data.draw(drawn(REGISTERED[name]))
    assert torch.equal(answer(name, case, options), answer(name, case, options, junk))


@each
@given(case=cases, junk=st.sampled_from(JUNK), data=st.data())
def test_p2_valid_completions_alone_give_the_same_result(name, case, junk, data):
    options = data.draw(drawn(REGISTERED[name]))
    valid = [made for made in case if made.voting(policy)]
    assert same(answer(name, case, options, junk), answer(name, valid, options))


@each
@given(case=cases, source=st.randoms(use_true_random=False), data=st.data())
def test_p3_order_and_ids_of_groups_do_not_matter(name, case, source, data):
    options = data.draw(drawn(REGISTERED[name]))
    assert same(answer(name, case, options), answer(name, source.sample(case, len(case)), options, sign=-1))


@each
@given(case=cases, others=more, at=st.integers(0, 9), junk=st.sampled_from(JUNK), data=st.data())
def test_p4_invalid_completions_and_groups_change_nothing(name, case, others, at, junk, data):
    options = data.draw(drawn(REGISTERED[name]))
    bad = [*fresh(others, "dropped"), Made(-1, 7, 1.0, "failed"), Made(-2, 7, 0.0, "unmeasured")]
    assert same(answer(name, case, options), answer(name, [*case[:at], *bad, *case[at:]], options, junk))


@each
@given(case=cases, width=st.integers(1, 9), junk=st.sampled_from(JUNK), data=st.data())
def test_p10_p12_padding_and_tool_tokens_at_the_end_change_nothing(name, case, width, junk, data):
    options = data.draw(drawn(REGISTERED[name]))
    assert same(answer(name, case, options), answer(name, case, options, junk, width=width))


def about_one(name, case):
    """Return the inputs with 0.9 for every value."""
    inputs = inputs_of(case)
    return inputs | {need: torch.full_like(inputs[need], 0.9) for need in ("values", "values_C", "values_RT")}


@each_normaliser
@given(case=cases, data=st.data())
def test_p6_equal_values_are_exactly_0_if_a_mean_is_subtracted(name, case, data):
    options = data.draw(drawn(NORMALIZERS[name]))
    options |= {"shift": True} if "shift" in options else {"mean": "batch"}
    if options.get("leave_one_out") or "loss_C" in NORMALIZERS[name].input_names:
        case = [replace(made, state="ok") for made in case]  # all values count; otherwise one may lack siblings
    assert (answer(name, case, options, inputs=about_one(name, case)) == 0).all()


@each_normaliser
@given(case=cases, by=st.sampled_from([1.0, -3.5, 1024.0]), data=st.data())
def test_p7_a_shift_changes_nothing_if_a_mean_is_subtracted(name, case, by, data):
    options = data.draw(drawn(NORMALIZERS[name]))
    options |= {"shift": True} if "shift" in options else {"mean": "group", "leave_one_out": False}
    inputs = inputs_of(case)
    moved = inputs | {need: inputs[need] + by for need in ("values", "values_C", "values_RT")}
    before, after = answer(name, case, options, inputs=inputs), answer(name, case, options, inputs=moved)
    assert torch.allclose(before, after, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "option"), [*options_of(NORMALIZERS), *options_of(REWARD_SHAPINGS)])
def test_p18_every_option_has_an_effect(name, option):
    usual = defaults(REGISTERED[name])
    case = [*RICH, Made(key=7, group=1, reward=1.0, state="tool_errors", turns=(3,))]
    results = [answer(name, case, usual | {option: value}) for value in values_of(option)]
    assert not any(torch.equal(results[0], other) for other in results[1:])


def test_these_tests_make_every_input_of_the_registries():
    assert {*NORMALIZERS.inputs, *REWARD_SHAPINGS.inputs} <= set(inputs_of(RICH)), (
        "add what is missing to tests/cases/inputs.py"
    )
