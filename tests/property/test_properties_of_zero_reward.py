"""Completions that are trained at the reward 0 change nothing for others, and get what 0 is worth among them."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream.errors import SettingsError
from tests.cases.completions import VERSION, Made, build, cases
from tests.cases.inputs import RICH, inputs_of
from tests.cases.path import close
from tests.cases.tables import OPTIONS, settings_of
from tests.twins.advantages import mean_of, std_of
from workers.settings import Settings
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.advantages import ESTIMATORS, estimate
from workers.train.step.estimation import estimate_advantages
from workers.train.step.group_checks import filter_reasons, mask_batch

AFFINE = [name for name, found in ESTIMATORS.items() if found.traits.affine]
POLICY = {"truncation": {"length": "exclude", "max_turns": "zero_reward"}}
NORMALIZED = [
    {},
    {"reward_normalization": ["group", "group"]},
    {"reward_normalization": ["batch_leave_one_out", "batch"]},
    {"advantage_normalization": ["batch", "batch"]},
]
each_estimator = pytest.mark.parametrize("name", AFFINE)
each_normalization = pytest.mark.parametrize("normalized", NORMALIZED, ids=["none", "groups", "rewards", "tokens"])
cut_ones = st.lists(
    st.builds(
        Made,
        key=st.integers(10**6 + 1, 2 * 10**6),
        group=st.integers(0, 3),
        reward=st.sampled_from((0.0, 8.0, -2.0, 1e30)),
        state=st.just("max_turns"),
        turns=st.sampled_from([(1,), (4,), (9,), (2, 2)]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda made: made.key,
)


def settings_for(name: str, normalized: dict[str, list[str]]) -> Settings:
    return settings_of({"estimator": {"name": name, **OPTIONS.get(name, {})}, "algorithm": POLICY | normalized})


def advantages_of(case: list[Made], settings: Settings) -> torch.Tensor:
    batch = build(case)
    return estimate_advantages(batch, mask_batch(batch, settings, VERSION), settings).values_C


def ended(case: list[Made]) -> list[Made]:
    """Return the case without completions under the policy."""
    return [replace(made, state="ok") if made.state == "max_turns" else made for made in case]


@each_estimator
@each_normalization
@given(case=cases, cut=cut_ones)
def test_no_completion_in_b_gets_another_advantage_for_their_sake(name, normalized, case, cut):
    settings, case = settings_for(name, normalized), ended(case)
    alone, together = advantages_of(case, settings), advantages_of([*case, *cut], settings)
    assert close(together[: len(case)], alone)  # a sum over a wider tensor is rounded in another way
    assert torch.isfinite(together).all()


@each_estimator
@given(case=cases, cut=cut_ones)
def test_what_they_measured_and_what_filters_see_make_no_difference(name, case, cut):
    settings, case = settings_for(name, {}), ended(case)
    other = [replace(made, reward=0.25) for made in cut]
    assert torch.equal(advantages_of([*case, *cut], settings), advantages_of([*case, *other], settings))

    def reasons(case: list[Made]) -> dict[int, object]:
        batch = build(case)
        found = filter_reasons(batch, mask_batch(batch, settings, VERSION), settings)
        return {made.group: found[made.group] for made in case}

    before, after = reasons(case), reasons([*case, *cut])
    assert {group: after[group] for group in before} == before


@each_estimator
@given(case=cases, cut=cut_ones)
def test_they_get_the_advantage_of_a_completion_of_b_with_the_reward_0(name, case, cut):
    settings, case = settings_for(name, {}), [replace(made, stale=()) for made in ended(case)]
    values = advantages_of([*case, *cut], settings)
    voting = [i for i, made in enumerate(case) if made.voting(settings.truncation_policy)]
    for made, value in zip(cut, values[len(case) :].tolist(), strict=True):
        siblings = [i for i in voting if case[i].group == made.group]
        zeros = [values[i].item() for i in siblings if case[i].reward == 0]
        if len({case[i].reward for i in siblings}) < 2:
            assert value == 0
        elif zeros:
            assert value == pytest.approx(zeros[0], rel=1e-9, abs=1e-9)


@given(rewards=st.lists(st.sampled_from((0.0, 1.0, 0.5, -2.0, 0.875, 8.0)), min_size=2, max_size=8))
def test_a_plain_loop_gives_the_same(rewards):
    case = [Made(key=i, group=0, reward=reward) for i, reward in enumerate(rewards)]
    cut = Made(key=99, group=0, reward=7.0, state="max_turns")
    mean, std, number = mean_of(rewards), std_of(rewards), len(rewards)
    for name, expected in {
        "dr_grpo": -mean,
        "rloo": -mean * Fraction(number, number - 1),
        "grpo": max(min(-float(mean) / (std + 1e-4), 1e9), -1e9),
    }.items():
        value = advantages_of([*case, cut], settings_for(name, {}))[-1].item()
        if len(set(rewards)) == 1:
            assert value == 0
        elif name == "grpo":
            reach = number / math.sqrt(number + 1) * std / (std + 1e-4)
            assert value == pytest.approx(max(-reach, min(reach, expected)), rel=1e-9)
        else:
            assert value == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in AFFINE])
def test_an_estimator_without_such_a_line_is_refused(name):
    with pytest.raises(SettingsError, match=f"estimator.name = '{name}'"):
        parse_settings(
            {"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"a": "calculator"}}
            | {"estimator": {"name": name}, "algorithm": POLICY}
        )


@each_estimator
@given(case=cases)
def test_advantages_of_a_group_lie_on_a_line_over_the_rewards(name, case):
    """The trait `affine` holds."""
    options = settings_for(name, {}).estimator.options
    found = inputs_of([*RICH, *case])
    values = estimate(name, found, options, single_sample_policy="zero")
    groups, rewards = found["groups"], found["rewards_C"]
    for group in range(groups.num_groups):
        inside = groups.valid_C & (groups.codes_C == group)
        points = sorted(zip(rewards[inside].tolist(), values[inside].tolist(), strict=True))
        (x0, y0), (x1, y1) = points[0] if points else (0.0, 0.0), points[-1] if points else (0.0, 0.0)
        for x, y in points:
            on_line = y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y0
            assert y == pytest.approx(on_line, rel=1e-9, abs=1e-9)
