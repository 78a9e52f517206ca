"""Every importance level, rejection rule, selector and the interpolated proximal policy has the properties it declares.

test_twins_of_correction shows that junk, order, padding, masked rows and the division into rows change nothing, and
that each function equals a plain loop (P1, P2, P3, P8, P10, P19). test_properties_of_the_path covers the correction
within the whole path.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.completions import JUNK, VERSION, cases, interleaved
from tests.cases.inputs import RICH
from tests.cases.options import defaults, drawn, options_of, values_of
from tests.cases.path import close
from tests.cases.sheets import Sheet
from workers.train.algorithms.correction import IMPORTANCE_LEVELS, REJECTIONS, RejectionRule, importance_weights, reject
from workers.train.algorithms.proximal import METHODS, interpolate_logprobs
from workers.train.algorithms.sequences import Sequences, log_ratios
from workers.train.algorithms.token_selection import SELECTORS, select_tokens

USUAL = {"lower": 0.5, "upper": 1.5, "out_of_range": "truncate", "normalize": False}
OTHERS = {"lower": 0.9, "upper": 1.1, "out_of_range": "zero", "normalize": True}
LEAST, MOST = 0.6, 1.7
each_level, each_rule = pytest.mark.parametrize("name", IMPORTANCE_LEVELS), pytest.mark.parametrize("name", REJECTIONS)
each_selector = pytest.mark.parametrize("name", SELECTORS)


def pair(sheet, junk=0.0):
    """Log-probs of trainer and engine."""
    rollout = torch.where(sheet.mask_RT, sheet.batch.rollout_logprobs_RT, junk)
    return torch.where(sheet.mask_RT, rollout + sheet.number(37.0), junk), rollout


def weights(name, case, options):
    sheet = Sheet(case)
    ratios = log_ratios(*pair(sheet), Sequences(sheet.mask_RT, sheet.ids_R))
    return sheet, importance_weights(ratios, level=name, **options)


def kept(name, case, lower, upper):
    sheet = Sheet(case)
    ratios = log_ratios(*pair(sheet), Sequences(sheet.mask_RT, sheet.ids_R))
    return reject([RejectionRule(name, lower, upper)], ratios).kept_RT


def per_completion(sheet, values_RT):
    """Return the set of token values of each completion."""
    result = {}
    for owner, line, mask in zip(sheet.ids_R.tolist(), values_RT.tolist(), sheet.mask_RT.tolist(), strict=True):
        result.setdefault(owner, set()).update(value for value, inside in zip(line, mask, strict=True) if inside)
    return [values for values in result.values() if values]


@each_level
@given(case=cases)
def test_p7_each_unit_of_a_level_has_one_weight(name, case):
    sheet, result = weights(name, case, USUAL)
    if IMPORTANCE_LEVELS[name].traits.unit == "completion":
        assert all(len(values) == 1 for values in per_completion(sheet, result.raw_RT))
    else:
        train, rollout = pair(sheet)
        assert torch.allclose(result.raw_RT[sheet.mask_RT], (train - rollout).exp()[sheet.mask_RT])


@each_level
@given(case=cases)
def test_p7_normalized_weights_have_mean_1_over_the_units_of_their_level(name, case):
    sheet, result = weights(name, case, USUAL | {"normalize": True})
    units = per_completion(sheet, result.weights_RT)
    if IMPORTANCE_LEVELS[name].traits.unit == "completion":
        mean = math.fsum(sum(values) for values in units) / max(1, len(units))
    else:
        mean = float(result.weights_RT[sheet.mask_RT].mean()) if units else 0.0
    assert not units or mean == pytest.approx(1.0)


@each_rule
@given(case=cases)
def test_p7_a_rule_judges_tokens_or_whole_completions(name, case):
    declared = REJECTIONS[name].traits
    sheet = Sheet(case)
    result = reject([RejectionRule(name, LEAST, MOST)], log_ratios(*pair(sheet), Sequences(sheet.mask_RT, sheet.ids_R)))
    if declared.level == "sequence":
        assert all(len(values) == 1 for values in per_completion(sheet, result.kept_RT))
    elif declared.level == "token":
        # Per-token rules: treating every row as a separate completion changes nothing.
        alone = reject(
            [RejectionRule(name, LEAST, MOST)],
            log_ratios(*pair(sheet), Sequences(sheet.mask_RT, torch.arange(len(sheet.ids_R)))),
        )
        assert torch.equal(result.kept_RT, alone.kept_RT)
    assert ("lower" in REJECTIONS[name].option_names) == declared.two_sided
    assert reject(
        [RejectionRule(name, 0.0, math.inf)], log_ratios(*pair(sheet), Sequences(sheet.mask_RT, sheet.ids_R))
    ).kept_RT.equal(sheet.mask_RT)


def chosen(name, case, options, junk=0.0, **how):
    sheet = Sheet(case, **how)
    now, near = pair(sheet, junk)
    advantages = torch.where(sheet.mask_RT, 2 * sheet.number(91.0), junk)
    generator = torch.Generator().manual_seed(5)
    return sheet.by_key(select_tokens(name, now, near, advantages, sheet.mask_RT, generator, options).double())


@each_selector
@given(case=cases, junk=st.sampled_from(JUNK), width=st.integers(0, 4), data=st.data())
def test_p1_p10_a_selector_chooses_only_among_loss_tokens(name, case, junk, width, data):
    options = defaults(SELECTORS[name]) | data.draw(drawn(SELECTORS[name]))
    assert torch.equal(chosen(name, case, options), chosen(name, case, options, junk, width=width))


@each_selector
@given(case=cases, source=st.randoms(use_true_random=False))
def test_p3_selection_without_chance_does_not_depend_on_order(name, case, source):
    """Select all candidates, so that nothing depends on chance."""
    everyone = {option: 1.0 for option in SELECTORS[name].option_names if option.endswith("_ratio")}
    options, moved = defaults(SELECTORS[name]) | everyone, source.sample(case, len(case))
    assert torch.equal(chosen(name, case, options), chosen(name, moved, options, rows=interleaved(moved, source)))


@pytest.mark.parametrize("name", METHODS)
@given(case=cases, junk=st.sampled_from(JUNK), width=st.integers(0, 4))
def test_p1_p10_an_interpolated_proximal_policy_depends_only_on_sampled_tokens(name, case, junk, width):
    def found(junk, **how):
        sheet = Sheet(case, **how)
        train, rollout = pair(sheet, junk)
        versions = torch.where(sheet.mask_RT, sheet.batch.versions_RT, 10**6 if junk else 0)
        return sheet.by_key(interpolate_logprobs(rollout, train, versions, sheet.mask_RT, VERSION, method=name))

    assert torch.equal(found(0.0), found(junk))
    assert close(found(0.0), found(junk, width=width))


@pytest.mark.parametrize("option", USUAL)
@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
def test_p18_every_option_of_weights_has_an_effect(level, option):
    _, usual = weights(level, RICH, USUAL)
    _, other = weights(level, RICH, USUAL | {option: OTHERS[option]})
    assert not torch.equal(usual.weights_RT, other.weights_RT)


@pytest.mark.parametrize(("name", "option"), options_of(REJECTIONS))
def test_p18_every_bound_of_a_rule_has_an_effect(name, option):
    usual = {"lower": values_of("lower")[0], "upper": values_of("upper")[0]}
    results = [kept(name, RICH, **(usual | {option: value})) for value in (usual[option], *EFFECTIVE[option])]
    assert any(not torch.equal(results[0], other) for other in results[1:])


EFFECTIVE = {"lower": (0.9003, 0.9903), "upper": (0.0503, 0.9903, 3.0)}
"""Bounds; at least one affects each kind of rule: ratios or divergences, tokens or completions."""


@pytest.mark.parametrize(("name", "option"), options_of(SELECTORS))
def test_p18_every_option_of_a_selector_has_an_effect(name, option):
    usual = defaults(SELECTORS[name])
    if option in {"clip_low", "clip_high", "clip_cov_low", "clip_cov_high"}:
        usual |= {"clip_cov_ratio": 1.0}
    results = [chosen(name, RICH, usual | {option: value}) for value in values_of(option)]
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("name", METHODS)
def test_p18_all_methods_differ(name):
    sheet = Sheet(RICH)
    train, rollout = pair(sheet)
    result = {
        m: interpolate_logprobs(rollout, train, sheet.batch.versions_RT, sheet.mask_RT, VERSION + 2, method=m)
        for m in METHODS
    }
    assert not any(torch.equal(result[name], values) for other, values in result.items() if other != name)
