"""The invariants of validity: what is invalid is nowhere, in the maths and through a network's gradients.

A case is a list of completions; everything that belongs to a completion (tokens, log-probs) follows from its key, so
that completions can be reordered, added and taken away. The network is small, causal and float64.
"""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from stream.records import Completion, Group, Prompt, Row, Span
from stream.validity import DropReason, RewardReason, RolloutReason, TruncationReason, Unmeasured, measure
from workers import settings
from workers.train.algorithms.advantages import ESTIMATORS, grpo
from workers.train.batch import Batch, collate
from workers.train.algorithms.losses import clipped
from workers.train.algorithms.masks import (
    DROP_REASONS,
    NONE,
    REWARD_REASONS,
    ROLLOUT_REASONS,
    TRUNCATION_REASONS,
    Facts,
    Masks,
)
from workers.train.metrics import step_metrics
from workers.train.selection import derive_masks, verdicts

VOCABULARY = 11
SETTINGS = settings.Settings(
    model=settings.Model(path="none"),
    data=settings.Data(path="none"),
    algorithm=settings.Algorithm(
        truncation={
            TruncationReason.LENGTH: "exclude",
            TruncationReason.CONTEXT: "keep",
            TruncationReason.MAX_TURNS: "zero_reward",
            TruncationReason.TOOL_CALLS: "baseline_only",
        }
    ),
)
IN_BASELINE = ("ok", "context", "max_turns", "tool_calls")
STATES = (*IN_BASELINE, "length", "unmeasured", "failed", "dropped", "no_row")
COUNTERS = ("rows/", "groups/", "truncated/", "tokens/sampled", "tokens/not_finite", "valid_fraction")


@dataclass(frozen=True)
class Made:
    """A completion of a case."""

    key: int
    group: int
    reward: float
    state: str = "ok"
    tokens: int = 3
    rows: int = 1
    tail: int = 0
    """Unsampled tokens behind the last sampled one."""


@dataclass(frozen=True)
class Result:
    advantages: Tensor
    loss: Tensor
    gradients: list[Tensor]
    masks: Masks
    metrics: dict[str, float] = field(default_factory=dict)


completions = st.builds(
    Made,
    key=st.integers(0, 10**6),
    group=st.integers(0, 3),
    reward=st.sampled_from([0.0, 1.0, 0.5, -2.0, 0.9, 1e4]),
    state=st.sampled_from(STATES),
    tokens=st.integers(1, 4),
    rows=st.integers(1, 2),
)
cases = st.lists(completions, min_size=1, max_size=12, unique_by=lambda made: made.key)


def build(case: list[Made], extra_width: int = 0) -> Batch:
    """The batch of a case; group codes are used as they are, whether or not they are compact."""
    rows = [(c, part) for c, made in enumerate(case) for part in range(made.rows if made.state != "no_row" else 0)]
    lengths = [2 + case[c].tokens + case[c].tail for c, _ in rows]
    width = max(lengths, default=0) + extra_width
    tokens, behaviour = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width).double()
    sampled, versions = torch.zeros(len(rows), width, dtype=torch.bool), torch.full((len(rows), width), -1)
    for r, (c, part) in enumerate(rows):
        made, source = case[c], torch.Generator().manual_seed(case[c].key + 10**7 * part)
        end = 2 + made.tokens
        tokens[r, :end] = torch.randint(VOCABULARY, (end,), generator=source)
        behaviour[r, 2:end] = -3 * torch.rand(made.tokens, generator=source).double()
        tokens[r, end : lengths[r]] = 1
        sampled[r, 2:end], versions[r, 2:end] = True, made.key % 3
    truncated = [
        TRUNCATION_REASONS.index(TruncationReason(m.state)) if m.state in {*IN_BASELINE[1:], "length"} else NONE
        for m in case
    ]
    facts = Facts(
        group_ids_C=torch.tensor([m.group for m in case]),
        groups=max(m.group for m in case) + 1,
        rewards_C=torch.tensor([m.reward for m in case]).double(),
        measured_C=torch.tensor([m.state != "unmeasured" for m in case]),
        reward_reason_C=_codes(case, "unmeasured", REWARD_REASONS.index(RewardReason.RAISED)),
        failed_C=_codes(case, "failed", ROLLOUT_REASONS.index(RolloutReason.ENGINE)),
        truncated_C=torch.tensor(truncated),
        dropped_C=_codes(case, "dropped", DROP_REASONS.index(DropReason.PADDING)),
        turns_C=torch.ones(len(case), dtype=torch.int64),
    )
    return Batch(
        tokens_RT=tokens,
        sampled_RT=sampled,
        behaviour_logprobs_RT=behaviour,
        versions_RT=versions.int(),
        lengths_R=torch.tensor(lengths, dtype=torch.int64),
        completion_ids_R=torch.tensor([c for c, _ in rows], dtype=torch.int64),
        facts=facts,
        prompt_ids=tuple(str(g) for g in range(facts.groups)),
        greedy_rewards_G=torch.zeros(facts.groups).double(),
        greedy_measured_G=torch.zeros(facts.groups, dtype=torch.bool),
        greedy_truncated_G=torch.full((facts.groups,), NONE),
        part_names=(),
        parts_PC=torch.zeros(0, len(case)).double(),
        part_weights_P=torch.zeros(0).double(),
        turn_rewards_RT=torch.zeros_like(behaviour),
        outcome_C=facts.rewards_C,
    )


def _codes(case: list[Made], state: str, code: int) -> Tensor:
    return torch.tensor([code if made.state == state else NONE for made in case])


def evaluate(batch: Batch, *, junk: float | None = None, parts: list[list[int]] | None = None) -> Result:
    """Masks, advantages, loss, every parameter's gradient, metrics; with junk wherever nothing may look."""
    source = torch.Generator().manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 5), torch.nn.Linear(5, VOCABULARY)).double()
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=source).double()
    if junk is not None:
        outside_B = ~derive_masks(batch, SETTINGS, 3).baseline_C
        outside_L = ~derive_masks(batch, SETTINGS, 3).tokens_RT
        rewards = torch.where(outside_B, junk, batch.facts.rewards_C)
        # A token that is no candidate for the loss may hold anything; one that is, in a bad row, too.
        behaviour = torch.where(outside_L, junk, batch.behaviour_logprobs_RT)
        batch = replace(batch, facts=replace(batch.facts, rewards_C=rewards), behaviour_logprobs_RT=behaviour)
    masks = derive_masks(batch, SETTINGS, 3)
    advantages = grpo(masks.rewards_C, batch.facts.group_ids_C, masks.baseline_C, epsilon=1e-4)
    by_row = advantages[batch.completion_ids_R]
    if junk is not None:
        by_row = torch.where(masks.loss_R, by_row, junk)
    total, sums = torch.zeros(()).double(), {}
    for part in parts if parts is not None else [list(range(len(batch.lengths_R)))]:
        hidden = network[0](batch.tokens_RT[part]).cumsum(dim=1)
        logits = network[1](hidden).log_softmax(dim=-1).roll(1, dims=1)
        logprobs = logits.gather(2, batch.tokens_RT[part].unsqueeze(2)).squeeze(2)
        proximal = logprobs.detach() + 0.3 * batch.behaviour_logprobs_RT[part].sin()
        mask = masks.tokens_RT[part]
        if junk is not None:
            logprobs, proximal = torch.where(mask, logprobs, junk), torch.where(mask, proximal, junk)
        output = clipped(
            logprobs,
            proximal,
            batch.behaviour_logprobs_RT[part],
            by_row[part],
            mask,
            clip_low=0.2,
            clip_high=0.2,
            behaviour_cap=2.0,
            denominator=max(1, int(masks.tokens_RT.sum())),
        )
        total = total + output.loss
        sums = {name: sums.get(name, 0.0) + value for name, value in output.sums.items()}
    total.backward()
    metrics = step_metrics(batch, masks, advantages, version=3) | {name: float(value) for name, value in sums.items()}
    return Result(advantages, total.detach(), [p.grad for p in network.parameters()], masks, metrics)


def close(left: Tensor, right: Tensor) -> bool:
    """Equal to 1e-12 of the largest value."""
    scale = max(1.0, float(left.abs().max()) if left.numel() else 1.0)
    return torch.allclose(left, right, rtol=0, atol=1e-12 * scale)


def measured(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics that are no counters of what is invalid."""
    return {n: v for n, v in metrics.items() if not n.startswith(COUNTERS)}


def assert_same(left: Result, right: Result) -> None:
    """The same loss, gradients and metrics but for rounding."""
    assert close(left.loss, right.loss)
    assert all(close(a, b) for a, b in zip(left.gradients, right.gradients, strict=True))
    assert measured(left.metrics) == pytest.approx(measured(right.metrics), rel=1e-12, abs=1e-9)


@given(cases, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_p1_junk_in_invalid_places_changes_nothing(case, junk):
    clean, dirty = evaluate(build(case)), evaluate(build(case), junk=junk)
    assert torch.equal(clean.advantages, dirty.advantages)
    assert torch.equal(clean.loss, dirty.loss)
    assert all(torch.equal(a, b) for a, b in zip(clean.gradients, dirty.gradients, strict=True))
    assert measured(clean.metrics) == measured(dirty.metrics)
    assert (dirty.advantages[~dirty.masks.baseline_C] == 0).all()


@given(cases)
def test_p2_what_is_computed_equals_what_the_valid_completions_alone_give(case):
    valid = [made for made in case if made.state in IN_BASELINE]
    assume(valid)
    whole, part = evaluate(build(case)), evaluate(build(valid))
    assert close(whole.advantages[whole.masks.baseline_C], part.advantages)
    assert_same(whole, part)


@given(cases, st.randoms(use_true_random=False))
def test_p3_order_and_names_of_groups_do_not_matter(case, rng):
    order = rng.sample(range(len(case)), len(case))
    names = rng.sample(range(9), 9)
    moved = [replace(case[place], group=names[case[place].group]) for place in order]
    before, after = evaluate(build(case)), evaluate(build(moved))
    assert close(before.advantages[order], after.advantages)
    assert_same(before, after)


@given(cases, st.lists(completions, max_size=4))
def test_p4_padding_and_invalid_completions_change_nothing(case, others):
    bad = [replace(m, state="dropped" if m.key % 2 else "unmeasured") for m in others]
    group_of_nothing = [
        Made(key=1, group=7, reward=1.0, state="failed"),
        Made(key=2, group=7, reward=0.0, state="no_row"),
    ]
    before, after = evaluate(build(case)), evaluate(build([*case, *bad, *group_of_nothing]))
    assert close(before.advantages, after.advantages[: len(case)])
    assert (after.advantages[len(case) :] == 0).all()
    assert_same(before, after)


@given(completions, st.lists(completions, max_size=5))
def test_p5_a_lone_valid_completion_gets_zero_however_many_invalid_siblings(one, others):
    siblings = [replace(m, group=one.group, state="unmeasured") for m in others]
    result = evaluate(build([replace(one, state="ok"), *siblings]))
    assert result.advantages.tolist() == [0.0] * (1 + len(siblings))


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_p6_equal_rewards_give_exactly_zero(reward, size):
    rewards = torch.full((size,), reward).double()
    assert (grpo(rewards, torch.zeros(size).long(), torch.ones(size).bool(), epsilon=1e-12) == 0).all()


rewarded = st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5), st.booleans()), min_size=1, max_size=16)


def columns(members):
    groups, rewards, valid = zip(*members, strict=True)
    return torch.tensor(rewards).double(), torch.tensor(groups), torch.tensor(valid)


@given(rewarded, st.sampled_from(sorted(ESTIMATORS)))
def test_p7_what_an_estimator_declares_of_itself_holds(members, name):
    rewards, groups, valid = columns(members)
    estimator, options = ESTIMATORS[name], {"epsilon": 1e-14, "normalize_std": True}
    advantages = estimator(rewards, groups, valid, options)
    spreads = [rewards[valid & (groups == g)].std() for g in groups.unique() if (valid & (groups == g)).sum() > 1]
    assume(all(float(s) == 0 or float(s) > 1e-3 for s in spreads))
    if estimator.mean_centred:
        sums = torch.zeros(4).double().index_add(0, groups, advantages)
        assert float(sums.abs().max()) < 1e-9
    if estimator.shift_invariant:
        assert torch.allclose(estimator(rewards + 8.0, groups, valid, options), advantages, atol=1e-9)
    if estimator.scale_invariant:
        assert torch.allclose(estimator(rewards * 4.0, groups, valid, options), advantages, atol=1e-9)


@given(rewarded, st.sampled_from([0.0, 1e4]), st.booleans())
def test_p8_vectorised_equals_a_loop_over_groups(members, offset, normalize_std):
    rewards, groups, valid = columns(members)
    expected = [0.0] * len(members)
    for group in set(groups.tolist()):
        inside = [i for i in range(len(members)) if valid[i] and groups[i] == group]
        values = [float(rewards[i]) + offset for i in inside]
        if len(set(values)) < 2:
            continue
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
        for i, value in zip(inside, values, strict=True):
            expected[i] = (value - mean) / (std + 1e-4) if normalize_std else value - mean
    found = grpo(rewards + offset, groups, valid, normalize_std=normalize_std, epsilon=1e-4)
    assert found.tolist() == pytest.approx(expected, abs=1e-8)


@given(cases, st.integers(1, 9))
def test_p10_padding_of_any_width_changes_nothing(case, width):
    narrow, wide = evaluate(build(case)), evaluate(build(case, width))
    assert torch.equal(narrow.advantages, wide.advantages)
    assert_same(narrow, wide)


@given(cases, st.integers(1, 5))
def test_p12_tool_tokens_at_the_end_do_not_change_an_advantage(case, tail):
    before, after = evaluate(build(case)), evaluate(build([replace(made, tail=tail) for made in case]))
    assert torch.equal(before.advantages, after.advantages)
    assert_same(before, after)


@given(cases, st.randoms(use_true_random=False))
def test_p13_any_partition_into_micro_batches_gives_the_same_loss_and_gradient(case, rng):
    batch = build(case)
    assume(len(batch.lengths_R))
    rows = rng.sample(range(len(batch.lengths_R)), len(batch.lengths_R))
    cuts = sorted(rng.randrange(len(rows) + 1) for _ in range(3))
    parts = [p for p in (rows[: cuts[0]], rows[cuts[0] : cuts[1]], rows[cuts[1] : cuts[2]], rows[cuts[2] :]) if p]
    assert_same(evaluate(batch), evaluate(batch, parts=parts))


@given(cases, st.integers(0, 3))
def test_p14_rejecting_a_row_equals_never_having_had_it(case, which):
    batch = build(case)
    assume(which < len(batch.lengths_R))
    behaviour = batch.behaviour_logprobs_RT.clone()
    behaviour[which][batch.sampled_RT[which]] = math.nan
    completion = int(batch.completion_ids_R[which])
    left = [
        replace(m, rows=m.rows - 1, state=m.state if m.rows > 1 else "no_row") if c == completion else m
        for c, m in enumerate(case)
    ]
    assume(case[completion].rows == 1 or int(batch.completion_ids_R[:which].eq(completion).sum()) == 1)
    # Under `baseline_only` a completion is outside of L, where token data is junk that decides nothing (P1).
    assume(case[completion].state != "tool_calls")
    rejected, never = evaluate(replace(batch, behaviour_logprobs_RT=behaviour)), evaluate(build(left))
    assert close(rejected.advantages, never.advantages)
    assert close(rejected.loss, never.loss)
    assert all(close(a, b) for a, b in zip(rejected.gradients, never.gradients, strict=True))


@given(cases)
def test_p15_what_bears_loss_votes(case):
    batch = build(case)
    masks = derive_masks(batch, SETTINGS, 3)
    assert (masks.baseline_C | ~masks.loss_C).all()
    assert masks.baseline_C.tolist() == [made.state in IN_BASELINE for made in case]
    assert (masks.loss_C[batch.completion_ids_R] == masks.loss_R).all()
    assert (batch.sampled_RT | ~masks.tokens_RT).all()


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6))
def test_p16_a_measured_zero_is_not_an_unmeasured_reward(rewards):
    siblings = [Made(key=i, group=0, reward=r) for i, r in enumerate(rewards)]
    one = Made(key=99, group=0, reward=0.0)
    zero, unknown = build([*siblings, one]), build([*siblings, replace(one, state="unmeasured")])
    with_zero, without = evaluate(zero), evaluate(unknown)
    assert not torch.equal(with_zero.masks.tokens_RT, without.masks.tokens_RT)


@given(
    st.lists(st.sampled_from([0.0, 1.0, None]), min_size=2, max_size=6),
    st.sampled_from([RewardReason.RAISED, RewardReason.TIMEOUT]),
)
def test_p17_why_a_reward_is_unknown_changes_counters_alone(rewards, reason):
    assume(None in rewards)

    def group(unknown):
        row = Row(prompt_ids=bytes(8), token_ids=bytes(12), sampled=[(0, 3)], logprobs=bytes(12), spans=[Span(0, 0, 3)])
        return Group(
            prompt=Prompt(id="p", messages=[]),
            completions=[
                Completion(index=i, rows=[row], reward=unknown if r is None else measure(r))
                for i, r in enumerate(rewards)
            ],
        )

    batches = [collate([group(reward)]) for reward in (Unmeasured(reason), measure(None), measure(math.nan), None)]
    results = [evaluate(replace(b, behaviour_logprobs_RT=b.behaviour_logprobs_RT.double())) for b in batches]
    for batch, result in zip(batches[1:], results[1:], strict=True):
        assert torch.equal(result.advantages, results[0].advantages)
        assert torch.equal(result.loss, results[0].loss)
        assert torch.equal(result.masks.tokens_RT, results[0].masks.tokens_RT)
        assert torch.equal(batch.facts.rewards_C, batches[0].facts.rewards_C)
    states = [{n for n in r.metrics if n.startswith("rows/reward")} for r in results]
    assert states[:3] == [{f"rows/reward:{reason}"}, {"rows/reward:missing"}, {"rows/reward:not_finite"}]


@given(cases)
def test_p19_splitting_a_completion_into_rows_leaves_its_siblings_unchanged(case):
    one = evaluate(build([replace(made, rows=1) for made in case]))
    several = evaluate(build([replace(made, rows=1 + made.key % 3) for made in case]))
    assert torch.equal(one.advantages, several.advantages)


@given(cases)
def test_groups_without_signal_are_found_by_what_is_in_the_baseline_alone(case):
    batch = build(case)
    masks = derive_masks(batch, SETTINGS, 3)
    found = verdicts(batch, masks, replace_algorithm(min_valid_rows=1))
    for group, reason in enumerate(found):
        values = [
            0.0 if m.state == "max_turns" else m.reward for m in case if m.group == group and m.state in IN_BASELINE
        ]
        if not values:
            assert reason is DropReason.NO_VALID_ROW
        elif len(values) > 1 and len(set(values)) == 1:
            assert reason is DropReason.ZERO_VARIANCE
        else:
            assert reason is None


def replace_algorithm(**changes):
    import msgspec

    algorithm = msgspec.structs.replace(SETTINGS.algorithm, **changes)
    return msgspec.structs.replace(SETTINGS, algorithm=algorithm)
