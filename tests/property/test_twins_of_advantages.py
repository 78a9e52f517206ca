"""Every registered estimator and normalizer equals its naive twin on random batches.

Groups have one to nine completions, interleaved, some invalid; all entries that must be ignored hold junk.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.twins import normalization as normalization_twins
from tests.twins.advantages import TWINS, Case
from workers.train.algorithms.advantages import ESTIMATORS, estimate
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.normalization import LEVELS, NORMALIZERS

JUNK = [math.nan, math.inf, -math.inf, 1e30, -7.0]
OPTIONS = {
    "normalize_std": st.booleans(),
    "leave_one_out": st.booleans(),
    "whiten": st.booleans(),
    "center": st.sampled_from(["completions", "tokens"]),
    "zero_tail": st.booleans(),
    "unbiased": st.booleans(),
    "shift": st.booleans(),
    "epsilon": st.sampled_from([1e-6, 1e-4, 0.5]),
    "discount": st.sampled_from([0.0, 0.9, 1.0]),
    "gae_lambda": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    "f_norm": st.sampled_from([1.0, 2.5]),
    "k": st.integers(1, 9),
    "mean": st.sampled_from(LEVELS),
    "std": st.sampled_from(LEVELS),
}
"""Values of each option, by name. An estimator with an option that is missing here fails."""

levels = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.floats(0, 5))


@st.composite
def batches(draw):
    """Draw a case in which every entry is meaningful; junk is added later."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    groups = draw(st.permutations([code for code, size in enumerate(sizes) for _ in range(size)]))
    # No mean is 0 but for rounding: `max_rl` divides by it.
    offset = draw(st.sampled_from([0.0, 1e4, -20.0]))
    many = len(groups)

    def column(values, count=many):
        return draw(st.lists(values, min_size=count, max_size=count))

    rewards, lengths, bears_loss = (
        [offset + r for r in column(levels)],
        column(st.integers(0, 9)),
        column(st.booleans()),
    )
    return Case(
        groups=groups,
        rewards=rewards,
        valid=column(st.integers(0, 3).map(bool)),
        lengths=lengths,
        loss_lengths=[n if bears else 0 for n, bears in zip(lengths, bears_loss, strict=True)],
        parts=[column(levels), column(st.floats(-3, 3)), column(st.just(0.9))],
        part_weights=[0.7, 2.0, 1.0],
        correct=column(st.booleans()),
    )


@st.composite
def sheets(draw):
    """Draw a case with tokens: up to seven per completion, with gaps and empty rows."""
    case = draw(batches())
    many, width = len(case.groups), draw(st.integers(0, 7))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    uniform = [torch.rand(many, width, generator=source, dtype=torch.float64) for _ in range(6)]
    pi = uniform[0].clamp(min=0.05)
    return replace(
        case,
        mask=(uniform[1] < draw(st.sampled_from([0.0, 0.4, 0.8, 1.0]))).tolist(),
        token_rewards=(4 * uniform[2] - 2).tolist(),
        values=(2 * uniform[3] - 1).tolist(),
        bootstrap=torch.rand(many, generator=source).double().tolist(),
        greedy=torch.rand(many, generator=source).double().tolist(),
        old_logprobs=pi.log().tolist(),
        # Valid for probabilities: at least pi^2, and the rest is shared by at least one other token.
        sum_pi_squared=(pi.square() + uniform[4] * (1 - pi).square()).tolist(),
        weights=(0.2 + 1.8 * uniform[5]).tolist(),
    )


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def dirty(values, keep, junk):
    """Return the values with junk in all entries that must be ignored."""
    return torch.where(keep, values, junk)


def inputs_of(case, junk):
    """Build the registry's inputs. Neither group codes nor other numbers reveal which entries are junk."""
    valid = torch.tensor(case.valid)
    result = {
        "groups": Grouping(torch.tensor(case.groups), valid, max(case.groups) + 1),
        "rewards_C": dirty(numbers(case.rewards), valid, junk),
        "lengths_C": torch.where(valid, torch.tensor(case.lengths), 10**9),
        "loss_lengths_C": torch.tensor(case.loss_lengths) * valid,
        "parts_PC": dirty(numbers(case.parts), valid, junk),
        "has_part_PC": valid.expand(len(case.parts), -1) ^ (junk == -7.0) * ~valid,
        "part_weights_P": numbers(case.part_weights),
        "correct_C": torch.tensor(case.correct) ^ ~valid,
    }
    if not case.mask:
        return result
    mask = torch.tensor(case.mask, dtype=torch.bool).view(len(valid), -1)
    lines = mask.any(dim=1)
    names = ("token_rewards", "values", "old_logprobs", "sum_pi_squared", "weights")
    tokens = {f"{name}_CT": dirty(numbers(getattr(case, name)).view(mask.shape), mask, junk) for name in names}
    ends = {f"{name}_C": dirty(numbers(getattr(case, name)), lines, junk) for name in ("bootstrap", "greedy")}
    return result | tokens | ends | {"mask_CT": mask}


def assert_equal(result, expected):
    expected = numbers(expected).view(result.shape)
    assert result.dtype == torch.float64
    assert torch.allclose(result, expected, rtol=1e-8, atol=1e-8), f"{result}\n{expected}"


def test_every_estimator_has_a_twin():
    assert set(TWINS) == set(ESTIMATORS)


@pytest.mark.parametrize("name", [n for n, e in ESTIMATORS.items() if e.traits.level == "completion"])
@given(case=batches(), junk=st.sampled_from(JUNK), data=st.data())
def test_a_completion_level_estimator_equals_its_twin(name, case, junk, data):
    options = {option: data.draw(OPTIONS[option], option) for option in ESTIMATORS[name].option_names}
    assert_equal(
        estimate(name, inputs_of(case, junk), options, single_sample_policy="zero"), TWINS[name](case, **options)
    )


@pytest.mark.parametrize("name", [n for n, e in ESTIMATORS.items() if e.traits.level == "token"])
@given(case=sheets(), junk=st.sampled_from(JUNK), data=st.data())
def test_a_token_level_estimator_equals_its_twin(name, case, junk, data):
    options = {option: data.draw(OPTIONS[option], option) for option in ESTIMATORS[name].option_names}
    result = estimate(name, inputs_of(case, junk), options, single_sample_policy="zero")
    advantages, returns = TWINS[name](case, **options)
    assert_equal(result.advantages_CT, advantages)
    assert_equal(result.returns_CT, returns)


def test_every_normalizer_has_a_twin():
    assert set(NORMALIZERS) == {"whiten", "normalize", "normalize_tokens"}


@given(case=batches(), junk=st.sampled_from(JUNK), weighted=st.booleans(), data=st.data())
def test_whitening_equals_its_twin(case, junk, weighted, data):
    chosen = NORMALIZERS["whiten"]
    options = {option: data.draw(OPTIONS[option], option) for option in chosen.option_names}
    valid = torch.tensor(case.valid)
    result = chosen(
        {
            "values": dirty(numbers(case.rewards), valid, junk),
            "mask": valid,
            "weights": torch.tensor(case.lengths) if weighted else None,
        },
        options,
    )
    weights = case.lengths if weighted else None
    assert_equal(result, normalization_twins.whiten(case.rewards, case.valid, weights, **options))


@given(case=batches(), junk=st.sampled_from(JUNK), apart=st.booleans(), data=st.data())
def test_normalizing_completions_equals_its_twin(case, junk, apart, data):
    chosen = NORMALIZERS["normalize"]
    options = {option: data.draw(OPTIONS[option], option) for option in chosen.option_names}
    inputs = inputs_of(case, junk)
    voting = case.correct if apart else None
    result = chosen(
        {
            "values_C": inputs["rewards_C"],
            "groups": inputs["groups"],
            "loss_C": torch.tensor(voting) if apart else None,
        },
        options,
    )
    assert_equal(result, normalization_twins.normalize(case.rewards, case.groups, case.valid, voting, **options))


@given(case=sheets(), junk=st.sampled_from(JUNK), data=st.data())
def test_normalizing_tokens_equals_its_twin(case, junk, data):
    chosen = NORMALIZERS["normalize_tokens"]
    options = {option: data.draw(OPTIONS[option], option) for option in chosen.option_names}
    inputs = inputs_of(case, junk)
    result = chosen(
        {
            "values_RT": inputs["token_rewards_CT"],
            "mask_RT": inputs["mask_CT"],
            # Any integers, in any order.
            "group_ids_R": torch.tensor(case.groups) * -(10**12),
        },
        options,
    )
    width = len(case.mask[0])
    expected = normalization_twins.normalize(
        [value for line in case.token_rewards for value in line],
        [group for group in case.groups for _ in range(width)],
        [counts for line in case.mask for counts in line],
        **options,
    )
    assert_equal(result, expected)
