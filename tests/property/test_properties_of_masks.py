"""Which completions vote and which train follows only from the facts and the truncation policies."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from stream.records import Completion, Group, Prompt
from stream.validity import RewardReason, TruncationReason, Unmeasured, measure
from tests.cases.completions import INVALID, JUNK, TRUNCATED, VERSION, Made, build, cases, interleaved
from tests.cases.path import evaluate
from tests.cases.rows import sampled_row
from tests.cases.tables import SOME, TABLES, choosing, settings_of
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.masks import (
    NONE,
    TRUNCATION_POLICIES,
    derive_masks,
    drop_completions,
    only_baseline,
    reject_tokens,
)
from workers.train.step.batch import collate
from workers.train.step.estimation import _EstimatorInputs
from workers.train.step.group_checks import mask_batch

policies = st.fixed_dictionaries(
    {TruncationReason(reason): st.sampled_from(TRUNCATION_POLICIES) for reason in TRUNCATED}
)
each_estimator = pytest.mark.parametrize(
    "table", {name.split()[0]: name for name in TABLES}.values(), ids=lambda name: name.split()[0]
)
SETTINGS = {name: settings_of(choosing(table, SOME)) for name, table in TABLES.items()}


def derived(case, truncation, batch=None, rejected=None):
    batch = batch or build(case)
    taken = {"too_old": batch.sampled_RT & (batch.versions_RT == 0), **(rejected or {})}
    unusable = ~torch.isfinite(batch.rollout_logprobs_RT)
    masks = derive_masks(
        batch.facts,
        batch.completion_ids_R,
        batch.sampled_RT,
        truncation=truncation,
        rejected_by_rule=taken,
        not_finite_RT=unusable,
    )
    return batch, masks


def left(made):
    """Return whether the completion has at least one token that is not too old."""
    return made.state != "no_row" and not set(range(sum(made.turns))) <= set(made.stale)


@given(case=cases, truncation=policies)
def test_p15_l_is_within_b_but_for_zero_reward_and_both_follow_from_the_facts(case, truncation):
    batch, masks = derived(case, truncation)
    zeroed = [truncation.get(made.truncated) == "zero_reward" for made in case]
    assert (masks.baseline_C | ~masks.loss_C | torch.tensor(zeroed, dtype=torch.bool)).all()
    for made, votes, bears in zip(case, masks.baseline_C.tolist(), masks.loss_C.tolist(), strict=True):
        policy = truncation.get(made.truncated)
        used = made.state not in INVALID and policy != "exclude" and left(made)
        assert votes == (used and policy != "zero_reward")
        assert bears == (used and policy != "baseline_only")
    assert (batch.sampled_RT | ~masks.baseline_tokens_RT).all()
    in_baseline_R1 = masks.baseline_C[batch.completion_ids_R].unsqueeze(1)
    assert (masks.baseline_tokens_RT | ~masks.loss_tokens_RT | ~in_baseline_R1).all()
    assert (masks.loss_C[batch.completion_ids_R] | ~masks.loss_rows_R).all()
    assert masks.loss_rows_R.equal(masks.loss_tokens_RT.any(dim=1))
    bears_R1 = masks.loss_C[batch.completion_ids_R].unsqueeze(1)
    assert (masks.loss_tokens_RT & in_baseline_R1).equal(masks.baseline_tokens_RT & bears_R1)
    assert (masks.rewards_C[~masks.baseline_C | masks.zeroed_C] == 0).all()
    assert torch.isfinite(masks.rewards_C).all()


@given(case=cases, truncation=policies, junk=st.sampled_from(JUNK))
def test_p1_junk_in_an_invalid_reward_or_log_prob_changes_no_mask(case, truncation, junk):
    batch, masks = derived(case, truncation)
    outside = ~masks.used_C & (masks.rejected_by_C < 0)
    facts = replace(batch.facts, rewards_C=torch.where(outside, junk, batch.facts.rewards_C))
    usable = torch.where(
        batch.sampled_RT & ~outside[batch.completion_ids_R].unsqueeze(1), batch.rollout_logprobs_RT, junk
    )
    _, dirty = derived(case, truncation, replace(batch, facts=facts, rollout_logprobs_RT=usable))
    for name in (
        "baseline_C",
        "loss_C",
        "rewards_C",
        "baseline_tokens_RT",
        "loss_tokens_RT",
        "zeroed_C",
        "penalised_C",
    ):
        assert torch.equal(getattr(masks, name), getattr(dirty, name)), name


@given(case=cases, truncation=policies, source=st.randoms(use_true_random=False))
def test_p3_p10_order_and_padding_change_no_mask(case, truncation, source):
    _, before = derived(case, truncation)
    moved = source.sample(case, len(case))
    _, after = derived(moved, truncation, build(moved, rows=interleaved(moved, source), width=3))
    place = {made.key: c for c, made in enumerate(case)}
    order = [place[made.key] for made in moved]
    for name in ("baseline_C", "loss_C", "rewards_C", "rejected_by_C"):
        assert torch.equal(getattr(before, name)[order], getattr(after, name)), name
    assert int(before.loss_tokens_RT.sum()) == int(after.loss_tokens_RT.sum())


@given(case=cases, truncation=policies, source=st.randoms(use_true_random=False))
def test_p14_rejecting_the_last_token_removes_the_completion_from_b(case, truncation, source):
    batch = build(case)
    taken = torch.zeros_like(batch.sampled_RT)
    gone = {c for c in range(len(case)) if source.random() < 0.5}
    for row, c in enumerate(batch.completion_ids_R.tolist()):
        taken[row] = batch.sampled_RT[row] & (c in gone)
    _, masks = derived(case, truncation, batch, {"a rule": taken})
    _, before = derived(case, truncation, batch)
    lost = torch.tensor([c in gone for c in range(len(case))])
    assert torch.equal(masks.baseline_C, before.baseline_C & ~lost)
    assert torch.equal(masks.loss_C, before.loss_C & ~lost)


@given(case=cases, truncation=policies, source=st.randoms(use_true_random=False))
def test_rejecting_after_deriving_masks_equals_deriving_them_with_the_rejection(case, truncation, source):
    batch = build(case)
    rows = [source.random() < 0.4 for _ in batch.completion_ids_R]
    taken = batch.sampled_RT & torch.tensor(rows, dtype=torch.bool).view(-1, 1)
    dropped = torch.tensor([source.random() < 0.3 for _ in case])
    _, before = derived(case, truncation, batch)
    later = reject_tokens(before, batch.completion_ids_R, {"a rule": taken})
    _, together = derived(case, truncation, batch, {"a rule": taken})
    same_masks(later, together)
    reasons = torch.where(dropped & later.used_C, 0, batch.facts.drop_reason_C)
    without = replace(batch, facts=replace(batch.facts, drop_reason_C=reasons))
    _, together = derived(case, truncation, without, {"a rule": taken})
    same_masks(drop_completions(later, batch.completion_ids_R, dropped), together)


def same_masks(left, right):
    """Check that all masks are equal. The rule that is blamed may differ with the order of the rules.

    Tokens of a completion that another rule has removed already are blamed on none.
    """
    kept_R = left.baseline_tokens_RT.any(dim=1)
    for field in fields(left):
        if field.name == "rejected_by_C":
            assert torch.equal(left.rejected_by_C == NONE, right.rejected_by_C == NONE)
        elif field.name == "token_rejected_by_RT":
            one, other = left.token_rejected_by_RT[kept_R], right.token_rejected_by_RT[kept_R]
            assert torch.equal(one == NONE, other == NONE)
        elif field.name != "rules":
            assert torch.equal(getattr(left, field.name), getattr(right, field.name)), field.name


@each_estimator
@given(case=cases)
def test_p15_inputs_of_estimators_use_these_masks(table, case):
    settings, batch = SETTINGS[table], build(case)
    masks = mask_batch(batch, settings, VERSION)
    inputs = _EstimatorInputs(batch, only_baseline(masks, batch.completion_ids_R), settings, None, None)
    masks = only_baseline(masks, batch.completion_ids_R)
    assert inputs.groups.valid_C.equal(masks.baseline_C)
    assert inputs.layout.mask_CT.sum() == masks.loss_tokens_RT.sum()
    assert (inputs.loss_lengths_C[~masks.loss_C] == 0).all()
    assert ((inputs.loss_lengths_C > 0) == masks.loss_C).all()
    assert (inputs.rewards_C[~masks.baseline_C] == 0).all()


@each_estimator
@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6))
def test_p16_a_measured_0_is_trained_and_an_unmeasured_reward_is_not(table, rewards):
    siblings = [Made(key=key, group=0, reward=reward) for key, reward in enumerate(rewards)]
    zero = Made(key=99, group=0, reward=0.0)
    one, other = [*siblings, zero], [*siblings, replace(zero, state="unmeasured")]
    known, unknown = (mask_batch(build(case), SETTINGS[table], VERSION) for case in (one, other))
    assert not torch.equal(known.loss_tokens_RT, unknown.loss_tokens_RT)
    assert known.loss_C[-1]
    assert not unknown.loss_C[-1]


@each_estimator
@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0, None]), min_size=2, max_size=5),
    reason=st.sampled_from([RewardReason.RAISED, RewardReason.TIMEOUT, RewardReason.SHAPE, RewardReason.UNAVAILABLE]),
)
def test_p17_the_reason_of_an_unmeasured_reward_changes_only_counters(table, rewards, reason):
    assume(None in rewards)
    settings = SETTINGS[table]
    # Every group has a greedy completion, so estimators that require one accept it.
    greedy = "greedy_C" in ESTIMATORS[settings.estimator.name].input_names
    made = [Made(key=key, group=0, reward=reward or 0.0) for key, reward in enumerate(rewards)]

    def result(unknown):
        def completion(index, reward, **facts):
            logprobs = [-2.0, -1.0, -0.5 * index]
            row = sampled_row([1 + index, 2, 3], logprobs, version=VERSION, prompt=[4, 5])
            return Completion(index=index, rows=[row], reward=reward, **facts)

        actual = [completion(i, unknown if r is None else measure(r)) for i, r in enumerate(rewards)]
        actual += [completion(9, measure(0.5), greedy=True)] if greedy else []
        batch = collate([Group(prompt=Prompt(id="p", messages=[]), completions=actual)])
        batch = replace(batch, rollout_logprobs_RT=batch.rollout_logprobs_RT.double())
        return evaluate(made, batch, settings)

    results = [result(reward) for reward in (Unmeasured(reason), measure(None), measure(math.nan), None)]
    for other in results[1:]:
        assert torch.equal(other.values, results[0].values)
        assert torch.equal(other.tokens, results[0].tokens)
        assert all(torch.equal(a, b) for a, b in zip(other.losses, results[0].losses, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(other.gradients, results[0].gradients, strict=True))
        assert torch.equal(other.batch.facts.rewards_C, results[0].batch.facts.rewards_C)
        assert without_reasons(other.metrics) == without_reasons(results[0].metrics)
    states = [{n for n in r.metrics if n.startswith("rows/reward")} for r in results]
    assert states[:3] == [{f"rows/reward:{reason}"}, {"rows/reward:missing"}, {"rows/reward:not_finite"}]


def without_reasons(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("rows/reward:")}
