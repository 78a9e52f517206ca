"""Every metric except the counters covers measured values only; every listed name is one or the other.

test_properties_of_the_path shows that junk, invalid completions, order, padding and micro-batches change no metric;
test_twins_of_correction, that the metrics of the correction equal a plain loop. These tests check what each metric
covers, and that none is missing.
"""

import math
import statistics
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream.records import DiscardReason
from stream.validity import DropReason
from tests.cases.branches import Line, Tree, compute, records
from tests.cases.completions import JUNK, VERSION, Made, build, cases, completions, fresh
from tests.cases.inputs import RICH
from tests.cases.path import OF_THE_LEARNER, Network, counts, evaluate, measured
from tests.cases.tables import SOME, TABLES, choosing, settings_of
from workers.train.algorithms.correction_metrics import rejection_metrics
from workers.train.algorithms.sequences import log_ratios
from workers.train.model.logprobs import LogprobModel
from workers.train.ranks import Ranks
from workers.train.step.group_checks import GroupRewards, mask_batch
from workers.train.step.model_runner import ModelRunner
from workers.train.step.prepared_batch import prepare
from workers.train.step.step_metrics import STEP_METRICS, correction_step_metrics, step_metrics

SETTINGS = {name: settings_of(choosing(table, SOME)) for name, table in TABLES.items()}
POLICY = settings_of(
    {"algorithm": {"truncation": {"max_turns": "zero_reward_in_baseline", "tool_calls": "baseline_only"}}}
)
more = st.lists(completions, max_size=4, unique_by=lambda made: made.key)


def advantages_of(case):
    return torch.tensor([made.key % 7 - 3.0 for made in case], dtype=torch.float64)


def rewards_by_group(batch, masks):
    """Return rewards in the form of `check_group`, group by group."""
    of_group = [batch.facts.group_ids_C == group for group in range(batch.facts.num_groups)]
    return [
        GroupRewards(masks.rewards_C[inside_C], masks.baseline_C[inside_C], batch.parts.select(inside_C))
        for inside_C in of_group
    ]


def metrics_of(case, filtered=(), junk=None, dropped=None):
    """Compute a step's metrics for these completions, including rewards of groups that the filters dropped."""

    def masked(case):
        batch = build(case)
        masks = mask_batch(batch, POLICY, VERSION)
        if junk is not None:
            lost = ~masks.baseline_C & (masks.rejected_by_C < 0)
            facts = replace(batch.facts, rewards_C=torch.where(lost, junk, batch.facts.rewards_C))
            batch = replace(batch, facts=facts, parts_PC=torch.where(lost, junk, batch.parts_PC))
        return batch, mask_batch(batch, POLICY, VERSION)

    batch, masks = masked(case)
    advantages = torch.where(masks.loss_C, advantages_of(case), 0.0 if junk is None else junk)
    dropped_groups = rewards_by_group(*masked(filtered)) if filtered else []
    result = step_metrics(
        batch, masks, advantages, settings=POLICY, version=VERSION, filtered=dropped_groups, dropped=dropped or {}
    )
    return result, masks


@given(case=cases, filtered=more, junk=st.sampled_from(JUNK))
def test_p1_junk_changes_only_counters_of_junk(case, filtered, junk):
    (clean, _), (dirty, _) = metrics_of(case, fresh(filtered)), metrics_of(case, fresh(filtered), junk)
    assert clean == dirty


@given(case=cases, filtered=more)
def test_p2_valid_completions_alone_give_the_same_result(case, filtered):
    def valid(made):
        return made.voting(POLICY.truncation_policy)

    whole, _ = metrics_of(case, fresh(filtered))
    part, _ = metrics_of(list(filter(valid, case)), list(filter(valid, fresh(filtered))))
    assert measured(whole) == pytest.approx(measured(part), rel=1e-12, abs=1e-12)


@given(case=cases, others=more, at=st.integers(0, 9))
def test_p4_invalid_completions_change_only_counters(case, others, at):
    bad = [*fresh(others, "dropped"), Made(-1, 7, 1.0, "failed"), Made(-2, 7, 0.0, "unmeasured")]
    before, _ = metrics_of(case)
    after, _ = metrics_of([*case[:at], *bad, *case[at:]])
    assert measured(before) == pytest.approx(measured(after), rel=1e-12, abs=1e-12)
    assert after["valid_fraction"] <= before.get("valid_fraction", 1.0)


@given(case=cases)
def test_a_mean_covers_what_its_name_says_and_an_empty_mean_is_omitted(case):
    result, masks = metrics_of(case)
    voting = [c for c, inside in enumerate(masks.baseline_C.tolist()) if inside]
    rewards = [0.0 if case[c].state == "max_turns" else case[c].reward for c in voting]
    assert result["reward/count"] == len(voting)
    assert result.get("reward/mean") == (pytest.approx(statistics.fmean(rewards)) if rewards else None)
    assert result.get("reward/std") == (pytest.approx(statistics.stdev(rewards)) if len(rewards) > 1 else None)
    bearing = [float(advantages_of(case)[c]) for c, inside in enumerate(masks.loss_C.tolist()) if inside]
    assert result.get("advantage/mean") == (pytest.approx(statistics.fmean(bearing)) if bearing else None)
    lengths = [sum(case[c].turns) for c in voting]
    assert result.get("length/mean") == (pytest.approx(statistics.fmean(lengths)) if lengths else None)
    assert result["valid_fraction"] == pytest.approx(len(voting) / len(case))
    # One completion in each state.
    assert sum(value for name, value in result.items() if name.startswith("rows/")) == len(case)
    sizes = Counter(case[c].group for c in voting)
    assert result["groups/singleton"] == sum(size == 1 for size in sizes.values())
    assert all(math.isfinite(value) for value in result.values())


def test_the_list_has_exactly_the_metrics_that_the_path_makes():
    odd = [Made(key=7, group=1, reward=1.0, state="context"), Made(key=8, group=2, reward=0.0, state="failed")]
    result = set(metrics_of([*RICH, *odd], RICH[:4], dropped={DropReason.ZERO_VARIANCE: 1})[0])
    lines = (Line(), Line(discarded=DiscardReason.ROLE))
    branched = records([Tree(0, lines), Tree(1, lines, reward=0.0)])
    for name, settings in SETTINGS.items():
        metrics = evaluate([*RICH, *odd], build([*RICH, *odd]), settings).metrics
        assert metrics, name
        metrics |= compute(branched, settings).metrics
        result |= {key.removesuffix(" 0").removesuffix(" 1") for key in metrics}
    families = tuple(name.removesuffix("*") for name in STEP_METRICS if name.endswith("*"))
    alone = {name for name in STEP_METRICS if not name.endswith("*")}
    assert alone - result - {"loss", *OF_THE_LEARNER} == set(), "no table of tests/cases/tables.py leads to it"
    assert {family for family in families if not any(name.startswith(family) for name in result)} == set()
    assert {name for name in result if name not in alone and not name.startswith(families)} == set()


def test_only_known_names_are_counters():
    """A new metric must leave out invalid values unless it is listed here as a counter."""
    assert sorted(name for name in STEP_METRICS if counts(name)) == [
        "branches/discarded/*",
        "groups/dropped/*",
        "groups/kept",
        "groups/singleton",
        "groups/tie",
        "rows/*",
        "tokens/branch_*",
        "tokens/not_finite",
        "tokens/sampled",
        "tokens/too_old",
        "truncated/*",
        "valid_fraction",
    ]


@pytest.mark.parametrize("table", [name for name, result in SETTINGS.items() if result.correction.reject])
@given(case=cases)
def test_metrics_of_a_rule_cover_the_log_probs_that_it_checked(table, case):
    """The metrics include log-probs that the rule rejected."""
    settings, seen = SETTINGS[table], []
    network = Network.made(0).reset()
    critic = network.value if settings.estimator.name == "gae" else None
    runner = ModelRunner(LogprobModel.from_whole(network), None, critic, settings, Ranks())

    def forward_statistics(batch, mask_RT):
        seen.append(runner.forward_statistics(batch, mask_RT))
        return seen[0]

    batch = build(case)
    torch.set_default_dtype(torch.float64)
    try:
        prepared = prepare(batch, settings, VERSION, compute_statistics=forward_statistics, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    rejection = prepared.rejection
    judged = log_ratios(seen[0].old_logprobs_RT, batch.rollout_logprobs_RT, rejection.log_ratios.sequences)
    expected = rejection_metrics(replace(rejection, log_ratios=judged))
    result = correction_step_metrics(prepared, settings)
    for name, value in expected.items():
        assert result[f"correction/{name}"] == pytest.approx(float(value), rel=1e-9, abs=1e-12), name
