"""Every registered estimator compares only measured values, and has the traits it declares.

The twins in test_twins_of_advantages show that each equals a plain loop over groups, for all sizes and at an offset
of 1e4 (P8).
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.answers import by_key, same
from tests.cases.completions import JUNK, REWARDS, Made, cases, completions, fresh
from tests.cases.inputs import RICH, baseline, inputs_of, policy, tokens
from tests.cases.options import defaults, drawn, needed, options_of, values_of
from workers.train.algorithms.advantages import ESTIMATORS, estimate
from workers.train.algorithms.token_advantages import TokenAdvantages

each = pytest.mark.parametrize("name", ESTIMATORS)
OF_COMPLETIONS = [name for name, found in ESTIMATORS.items() if found.traits.level == "completion"]
each_of_completions = pytest.mark.parametrize("name", OF_COMPLETIONS)
more = st.lists(completions, max_size=5, unique_by=lambda made: made.key)


def answer(name, case, options, junk=0.0, *, singleton="zero", inputs=None, **how):
    """Advantages, and returns if the estimator makes them, of completions in B or tokens of L, sorted by key."""
    inputs = needed(inputs or inputs_of(case, junk, **how), ESTIMATORS[name])
    found = estimate(name, inputs, options, single_sample_policy=singleton)
    if isinstance(found, TokenAdvantages):
        return torch.cat([by_key(case, values, inputs["mask_CT"]) for values in found])
    assert found.dtype == torch.float64
    return by_key(case, found, inputs["groups"].valid_C)


@each
@given(case=cases, junk=st.sampled_from(JUNK), singleton=st.sampled_from(["zero", "raw"]), data=st.data())
def test_p1_junk_changes_no_bit(name, case, junk, singleton, data):
    options = data.draw(drawn(ESTIMATORS[name]))
    clean = answer(name, case, options, singleton=singleton)
    assert torch.equal(clean, answer(name, case, options, junk, singleton=singleton))


@each
@given(case=cases, junk=st.sampled_from(JUNK), singleton=st.sampled_from(["zero", "raw"]), data=st.data())
def test_p2_valid_completions_alone_give_the_same_result(name, case, junk, singleton, data):
    options = data.draw(drawn(ESTIMATORS[name]))
    valid = [made for made in case if made.voting(policy)]
    assert same(
        answer(name, case, options, junk, singleton=singleton), answer(name, valid, options, singleton=singleton)
    )


@each
@given(case=cases, source=st.randoms(use_true_random=False), data=st.data())
def test_p3_order_and_ids_of_groups_do_not_matter(name, case, source, data):
    options = data.draw(drawn(ESTIMATORS[name]))
    moved = source.sample(case, len(case))
    assert same(answer(name, case, options), answer(name, moved, options, sign=-1))


@each
@given(case=cases, others=more, at=st.integers(0, 9), junk=st.sampled_from(JUNK), data=st.data())
def test_p4_invalid_completions_and_groups_change_nothing(name, case, others, at, junk, data):
    options = data.draw(drawn(ESTIMATORS[name]))
    bad = [*fresh(others, "dropped"), Made(-1, 7, 1.0, "failed"), Made(-2, 7, 0.0, "unmeasured")]
    assert same(answer(name, case, options), answer(name, [*case[:at], *bad, *case[at:]], options, junk))


@each_of_completions
@given(case=cases, others=more, data=st.data())
def test_p5_a_single_valid_completion_has_advantage_0(name, case, others, data):
    """Holds before whitening. For estimators that whiten, all groups are singletons."""
    options = data.draw(drawn(ESTIMATORS[name]))
    alone = [replace(made, group=place) for place, made in enumerate(case)]
    siblings = [replace(made, group=made.group % len(case)) for made in fresh(others, "unmeasured")]
    assert (answer(name, alone + siblings, options, 1e30) == 0).all()
    if not ESTIMATORS[name].traits.whitened:
        others_too = [replace(made, group=99) for made in RICH]
        found = answer(name, [*alone, *siblings, *others_too], options)
        single = torch.tensor(
            [m.group != 99 for m in sorted([*alone, *others_too], key=lambda m: m.key) if m.voting(policy)]
        )
        assert (found[single.bool()] == 0).all()


@each_of_completions
@given(
    case=cases,
    rewards=st.lists(st.sampled_from([*REWARDS, 0.9, 0.1, 1 / 3, -1e9 - 0.1]), min_size=4, max_size=4),
    data=st.data(),
)
def test_p6_equal_rewards_give_advantages_of_exactly_0(name, case, rewards, data):
    """Holds before whitening. For estimators that whiten, all groups have equal rewards."""
    options = data.draw(drawn(ESTIMATORS[name]))
    case = [replace(made, reward=rewards[made.group]) for made in case]
    inputs = inputs_of(case)
    parts = torch.stack([inputs["rewards_C"], 3 * inputs["rewards_C"]])
    assert (answer(name, case, options, inputs=inputs | {"parts_PC": parts}) == 0).all()


def moved(inputs, how):
    """Return the inputs with transformed rewards."""
    return inputs | {need: how(inputs[need]) for need in ("rewards_C", "parts_PC")}


def reading_rewards(trait):
    return pytest.mark.parametrize("name", [n for n, found in ESTIMATORS.items() if getattr(found.traits, trait)])


@reading_rewards("mean_centred")
@given(case=cases, data=st.data())
def test_p7_advantages_of_a_group_sum_to_0(name, case, data):
    options = data.draw(drawn(ESTIMATORS[name]))
    if options.get("leave_one_out") or "rewards_C" in ESTIMATORS[name].input_names:
        case = [replace(made, reward=abs(made.reward)) for made in case]
    found = estimate(name, inputs_of(case), options, single_sample_policy="zero")
    groups = inputs_of(case)["groups"]
    assert same(groups.sum(found), torch.zeros(groups.num_groups, dtype=torch.float64))


@reading_rewards("shift_invariant")
@given(case=cases, by=st.sampled_from([1.0, -3.5, 1024.0]), data=st.data())
def test_p7_shifting_all_rewards_changes_nothing(name, case, by, data):
    options, inputs = data.draw(drawn(ESTIMATORS[name])), inputs_of(case)
    before = answer(name, case, options, inputs=inputs)
    after = answer(name, case, options, inputs=moved(inputs, lambda rewards: rewards + by))
    assert torch.allclose(before, after, rtol=1e-9, atol=1e-9)


@reading_rewards("scale_invariant")
@given(case=cases, by=st.sampled_from([0.5, 3.0, 100.0]), data=st.data())
def test_p7_scaling_all_rewards_changes_nothing_if_std_is_far_above_epsilon(name, case, by, data):
    options = data.draw(drawn(ESTIMATORS[name])) | {"normalize_std": True, "epsilon": 1e-12}
    inputs = inputs_of(case)
    before = answer(name, case, options, inputs=inputs)
    assert torch.allclose(
        before, answer(name, case, options, inputs=moved(inputs, lambda r: by * r)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", [n for n, found in ESTIMATORS.items() if found.traits.whitened])
@given(case=cases, data=st.data())
def test_p7_whitened_advantages_have_variance_1_over_tokens_and_mean_0_over_their_center(name, case, data):
    options = data.draw(drawn(ESTIMATORS[name])) | (
        {"whiten": True} if "whiten" in ESTIMATORS[name].option_names else {}
    )
    inputs = inputs_of(case)
    # Far above the epsilon of whitening: an estimator's epsilon may leave deviations of that size.
    if "part_weights_P" in ESTIMATORS[name].input_names:
        inputs = {**inputs, "part_weights_P": 1e6 * inputs["part_weights_P"]}
    else:
        inputs = moved(inputs, lambda rewards: 1e6 * rewards)
    found = estimate(name, inputs, options, single_sample_policy="zero")
    if isinstance(found, TokenAdvantages):
        values = found.advantages_CT[inputs["mask_CT"]]
        first_CT = inputs["mask_CT"] & (inputs["mask_CT"].cumsum(dim=1) == 1)
        centered = values if options["center"] == "tokens" else found.advantages_CT[first_CT]
    else:
        values = found.repeat_interleave(inputs["loss_lengths_C"])
        centered = values if options["center"] == "tokens" else found[inputs["loss_lengths_C"] > 0]
    if len(values) > 1:
        assert abs(float(centered.mean())) < 1e-6
        # Zero, but for rounding, where all values are equal.
        assert float(values.var()) == pytest.approx(1.0, abs=0.01) or float(values.var()) < 1e-6


@pytest.mark.parametrize("name", [n for n, found in ESTIMATORS.items() if found.traits.within_group])
@given(case=cases, data=st.data())
def test_p7_an_estimator_within_groups_does_not_depend_on_other_groups(name, case, data):
    options = data.draw(drawn(ESTIMATORS[name]))
    first = [made for made in case if made.group == case[0].group]
    others_too = [*first, *(replace(made, key=made.key + 10**8, group=9, reward=8 - made.reward) for made in case)]
    valid = answer(name, first, options)
    inputs = inputs_of(others_too)
    found = estimate(name, inputs, options, single_sample_policy="zero")
    own = torch.tensor([made.group != 9 for made in others_too])
    if isinstance(found, TokenAdvantages):
        found = torch.cat(
            [by_key(others_too, torch.where(own.unsqueeze(1), v, 0.0), tokens(others_too)) for v in found]
        )
        kept = [
            tokens(sorted(others_too, key=lambda m: m.key)),
            [m.group != 9 for m in sorted(others_too, key=lambda m: m.key)],
        ]
        of_first = torch.tensor(kept[1]).unsqueeze(1).expand(kept[0].shape)[kept[0]].repeat(2)
        assert same(found[of_first], valid)
    else:
        assert same(by_key(first, found[own], baseline(first)), valid)


@pytest.mark.parametrize("name", ["passk", "grpo_passk"])
@given(case=cases, junk=st.sampled_from(JUNK), data=st.data())
def test_p9_pass_at_k_credits_only_valid_completions(name, case, junk, data):
    options = data.draw(drawn(ESTIMATORS[name]))
    found = estimate(name, inputs_of(case, junk), options, single_sample_policy="zero")
    assert (found[~baseline(case)] == 0).all()
    best = {}
    for made in filter(lambda made: made.voting(policy), case):
        best[made.group] = max(best.get(made.group, made.reward), made.reward)
    for made, advantage in zip(case, found.tolist(), strict=True):
        if advantage > 0:
            assert made.voting(policy)
            assert made.reward >= 1.0 if name == "passk" else made.reward == best[made.group]


@each
@given(case=cases, width=st.integers(1, 9), junk=st.sampled_from(JUNK), data=st.data())
def test_p10_p12_padding_and_tool_tokens_at_the_end_change_nothing(name, case, width, junk, data):
    options = data.draw(drawn(ESTIMATORS[name]))
    assert same(answer(name, case, options), answer(name, case, options, junk, width=width))


@given(case=cases)
@pytest.mark.parametrize("name", OF_COMPLETIONS)
def test_p16_a_measured_0_is_not_an_unmeasured_reward(name, case):
    """The siblings' advantages differ; so do the masks (test_properties_of_masks)."""
    zero = Made(key=-1, group=0, reward=0.0)
    one, other = [*RICH, zero], [*RICH, replace(zero, state="unmeasured")]
    options = defaults(ESTIMATORS[name]) | ({"k": 1} if name == "passk" else {})
    left, right = (estimate(name, inputs_of(each), options, single_sample_policy="zero")[:-1] for each in (one, other))
    if name != "grpo_passk" or options["normalize_std"]:
        assert not torch.equal(left, right)


@pytest.mark.parametrize(("name", "option"), options_of(ESTIMATORS))
def test_p18_every_option_has_an_effect(name, option):
    usual = defaults(ESTIMATORS[name])
    found = [answer(name, RICH, usual | {option: value}) for value in values_of(option)]
    assert not any(torch.equal(found[0], other) for other in found[1:])


def test_these_tests_make_every_input_of_the_registry():
    assert set(ESTIMATORS.inputs) <= set(inputs_of(RICH)), "add what is missing to tests/cases/inputs.py"
