"""Every registered loss, aggregation and divergence, and the critic's loss, differentiated through a network.

test_twins_of_losses shows that each equals a plain loop over tokens (P8) and is finite at log-ratios of 100.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.cases.completions import INVALID, JUNK, Made, cases, completions, fresh, interleaved
from tests.cases.inputs import RICH
from tests.cases.options import defaults, drawn, options_of, values_of
from tests.cases.path import Network, close
from tests.cases.sheets import Sheet
from workers.train.algorithms.aggregation import AGGREGATIONS, BatchTotals, row_factors
from workers.train.algorithms.divergence import DIVERGENCES, divergence
from workers.train.algorithms.losses import LOSSES, LossInputs, LossOutput, policy_loss, value_loss, weighted_sum
from workers.train.algorithms.sequences import Sequences
from workers.train.algorithms.token_selection import SELECTORS

KL = {f"kl {name}": name for name in DIVERGENCES}
each = pytest.mark.parametrize("name", [*LOSSES, *KL, "value"])
aggregations = st.sampled_from(sorted(AGGREGATIONS))


@dataclass(frozen=True)
class Found:
    loss: Tensor
    gradients: list[Tensor]
    """With respect to every parameter."""
    own: Tensor
    """With respect to the log-prob (the critic: the value) of each loss token, sorted by key."""
    sums: dict[str, float]
    maxima: dict[str, float]


def options(name):
    return drawn(LOSSES[name]) if name in LOSSES else st.just({})


def run(name, case, chosen, aggregation="token-mean", *, junk=0.0, taken=None, split=None, **how):
    """Compute the loss of a case.

    Args:
        name: of the loss.
        case: the completions.
        chosen: the loss's options.
        aggregation: name.
        junk: value of every input outside the mask.
        taken: a row whose tokens are masked.
        split: number of the micro-batch of each completion; by default all are in one.
        how: options of the sheet.
    """
    sheet, network = Sheet(case, **how), Network.made(0).reset()
    if taken is not None:
        sheet.mask_RT[taken] = False
    lengths = Sequences(sheet.mask_RT, sheet.ids_R)
    totals = BatchTotals(tokens=int(sheet.mask_RT.sum()), completions=int((lengths.lengths_S > 0).sum()))
    factors_R = row_factors(aggregation, lengths.lengths_S[lengths.codes_R], totals, constant=3.0)
    factors_R = torch.where(sheet.mask_RT.any(dim=1), factors_R, junk)
    raw = (
        network.critic(network.hidden(sheet.batch.tokens_RT)).squeeze(-1)
        if name == "value"
        else sheet.logprobs(network)
    )
    now = torch.where(sheet.mask_RT, raw, junk)
    now.retain_grad()
    parts = [torch.tensor([(split or {}).get(int(c), 0) == part for c in sheet.ids_R]).bool() for part in range(3)]
    outputs = [_output(name, sheet, now, rows, factors_R, chosen, junk) for rows in parts if rows.any()]
    loss = sum((output.loss for output in outputs), torch.zeros((), dtype=torch.float64))
    if outputs:
        loss.backward()
    names = sorted({key for output in outputs for key in output.sums})
    return Found(
        loss=loss.detach(),
        gradients=[torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()],
        own=sheet.by_key(torch.zeros_like(now) if now.grad is None else now.grad),
        sums={key: math.fsum(float(output.sums[key]) for output in outputs) for key in names},
        maxima={key: max(float(o.maxima[key]) for o in outputs) for key in (outputs[0].maxima if outputs else ())},
    )


def _output(name, sheet, now, rows, factors_R, chosen, junk):
    mask, factors_M = sheet.mask_RT[rows], factors_R[rows]
    near = torch.where(mask, now[rows].detach() + 0.6 * sheet.number(37.0)[rows], junk)
    if name == "value":
        return value_loss(now[rows], near, sheet.number(91.0, junk)[rows], mask, factors_M, clip=0.2)
    if name in KL:
        estimate = divergence(KL[name], now[rows], near, mask)
        return LossOutput(weighted_sum(estimate, mask, factors_M), {"kl": estimate.detach().sum()}, {})
    return policy_loss(
        name,
        LossInputs(
            logprobs_RT=now[rows],
            proximal_RT=near,
            advantages_RT=torch.where(mask, 2 * sheet.number(91.0)[rows], junk),
            weights_RT=torch.where(mask, 1 + 0.5 * sheet.number(53.0)[rows], junk),
            selected_RT=torch.where(mask, sheet.number(17.0)[rows] > 0.3, junk != 0),
            sequences=Sequences(mask, sheet.ids_R[rows]),
        ),
        factors_M,
        chosen,
    )


def assert_same(left, right):
    assert close(left.loss, right.loss)
    assert all(close(one, other) for one, other in zip(left.gradients, right.gradients, strict=True))
    assert close(left.own, right.own)
    for one, other in ((left.sums, right.sums), (left.maxima, right.maxima)):
        # A micro-batch without rows has no sums.
        assert {key: one.get(key, 0.0) for key in one | other} == pytest.approx(
            {key: other.get(key, 0.0) for key in one | other}, rel=1e-12, abs=1e-11
        )


@each
@given(case=cases, aggregation=aggregations, junk=st.sampled_from(JUNK), data=st.data())
def test_p1_junk_changes_no_bit_of_loss_gradients_and_metrics(name, case, aggregation, junk, data):
    chosen = data.draw(options(name))
    clean, dirty = run(name, case, chosen, aggregation), run(name, case, chosen, aggregation, junk=junk)
    assert torch.equal(clean.loss, dirty.loss)
    assert all(torch.equal(one, other) for one, other in zip(clean.gradients, dirty.gradients, strict=True))
    assert torch.equal(clean.own, dirty.own)  # by_key has checked that all other gradients are exactly 0
    assert (clean.sums, clean.maxima) == (dirty.sums, dirty.maxima)


@each
@given(
    case=cases,
    others=st.lists(completions, max_size=4, unique_by=lambda made: made.key),
    aggregation=aggregations,
    data=st.data(),
)
def test_p2_p4_completions_without_loss_have_no_effect(name, case, others, aggregation, data):
    chosen = data.draw(options(name))
    valid = [made for made in case if made.state not in {*INVALID, "length", "tool_calls"}]
    assume(valid)
    alone = run(name, valid, chosen, aggregation)
    assert_same(run(name, case, chosen, aggregation), alone)
    bad = [*fresh(others, "length"), Made(-1, 7, 1.0, "tool_calls"), Made(-2, 7, 0.0, "length")]
    at = data.draw(st.integers(0, len(valid)))
    assert_same(run(name, [*valid[:at], *bad, *valid[at:]], chosen, aggregation, junk=math.nan), alone)


@each
@given(case=cases, aggregation=aggregations, source=st.randoms(use_true_random=False), data=st.data())
def test_p3_order_does_not_matter(name, case, aggregation, source, data):
    chosen, moved = data.draw(options(name)), source.sample(case, len(case))
    assert_same(
        run(name, case, chosen, aggregation), run(name, moved, chosen, aggregation, rows=interleaved(moved, source))
    )


@each
@given(case=cases, aggregation=aggregations, width=st.integers(1, 5), tail=st.integers(0, 3), data=st.data())
def test_p10_p12_padding_and_tool_tokens_at_the_end_change_nothing(name, case, aggregation, width, tail, data):
    chosen, longer = data.draw(options(name)), [replace(made, tail=tail) for made in case]
    assert_same(
        run(name, case, chosen, aggregation), run(name, longer, chosen, aggregation, width=width, junk=math.inf)
    )


@each
@given(case=cases, aggregation=aggregations, data=st.data())
def test_p13_every_partition_of_the_completions_gives_the_same_result(name, case, aggregation, data):
    chosen = data.draw(options(name))
    split = {c: data.draw(st.integers(0, 2)) for c in range(len(case))}
    assert_same(run(name, case, chosen, aggregation), run(name, case, chosen, aggregation, split=split))


@each
@given(case=cases, aggregation=aggregations, junk=st.sampled_from(JUNK), data=st.data())
def test_p14_a_fully_masked_row_has_no_effect(name, case, aggregation, junk, data):
    chosen, rows = data.draw(options(name)), interleaved(case, data.draw(st.randoms(use_true_random=False)))
    assume(rows)
    which = data.draw(st.integers(0, len(rows) - 1))
    rejected = run(name, case, chosen, aggregation, rows=rows, taken=which, junk=junk)
    assert_same(rejected, run(name, case, chosen, aggregation, rows=rows[:which] + rows[which + 1 :]))


@each
@given(case=cases, aggregation=aggregations, data=st.data())
def test_p19_a_completion_has_the_same_weight_in_one_row_and_in_several(name, case, aggregation, data):
    chosen = data.draw(options(name))
    whole, split = ([replace(made, forked=forked) for made in case] for forked in (False, True))
    assert_same(run(name, whole, chosen, aggregation), run(name, split, chosen, aggregation))


@pytest.mark.parametrize("name", LOSSES)
@given(case=cases, data=st.data())
def test_p7_declared_traits_of_losses_hold(name, case, data):
    declared, chosen = LOSSES[name].traits, data.draw(options(name))
    assert ("proximal_RT" not in LOSSES[name].input_names) == declared.on_policy
    assert ("selected_RT" in LOSSES[name].input_names) == bool(declared.selector)
    assert declared.selector in {"", *SELECTORS}
    assert declared.aggregation in {"", *AGGREGATIONS}
    if declared.on_policy:
        # The gradient is that of the log-prob alone, for any proximal policy.
        sheet = Sheet(case)
        by_hand = -2 * sheet.number(91.0) * (1 + 0.5 * sheet.number(53.0)) / max(1, int(sheet.mask_RT.sum()))
        assert close(run(name, case, chosen).own, sheet.by_key(torch.where(sheet.mask_RT, by_hand, 0.0)))


@pytest.mark.parametrize("name", DIVERGENCES)
@given(case=cases)
def test_p7_declared_traits_of_divergences_hold(name, case):
    declared, sheet = DIVERGENCES[name].traits, Sheet(case)
    logprobs = sheet.number(5.0).requires_grad_()
    reference, all_of_them = sheet.number(7.0), sheet.mask_RT
    result = divergence(name, logprobs, reference, all_of_them)
    assert not declared.non_negative or (result >= 0).all()
    assert (divergence(name, logprobs, logprobs.detach(), all_of_them) == 0).all()
    if declared.straight_through:
        own, other = (
            torch.autograd.grad(divergence(n, logprobs, reference, all_of_them).sum(), logprobs)[0]
            for n in (name, "k2")
        )
        assert close(own, other)
        assert torch.equal(
            result.detach(), divergence(name.removesuffix("+"), logprobs, reference, all_of_them).detach()
        )


@pytest.mark.parametrize(("name", "option"), options_of(LOSSES))
def test_p18_every_option_of_a_loss_has_an_effect(name, option):
    usual = defaults(LOSSES[name])
    results = [run(name, RICH, usual | {option: value}) for value in values_of(option)]
    assert not any(torch.equal(results[0].own, other.own) and results[0].loss == other.loss for other in results[1:])


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_p18_all_aggregations_differ(name):
    result = {other: run("clipped", RICH, defaults(LOSSES["clipped"]), other).own for other in AGGREGATIONS}
    assert not any(torch.equal(result[name], values) for other, values in result.items() if other != name)


@pytest.mark.parametrize(("name", "option"), options_of(AGGREGATIONS))
def test_p18_every_option_of_an_aggregation_has_an_effect(name, option):
    lengths, totals = torch.tensor([3, 2, 2]), BatchTotals(tokens=7, completions=3)
    results = [row_factors(name, lengths, totals, **{option: value}) for value in values_of(option)]
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(lengths=st.lists(st.integers(0, 5), max_size=6), ranks=st.integers(1, 3))
def test_p7_the_factors_of_a_batch_add_up_as_the_aggregation_declares(name, lengths, ranks):
    """Means add up to 1. A completion without tokens has no factor; an empty batch adds up to 0."""
    lengths_R = torch.tensor(lengths, dtype=torch.int64)
    totals = BatchTotals(tokens=sum(lengths), completions=sum(n > 0 for n in lengths), ranks=ranks)
    result = row_factors(name, lengths_R, totals, constant=4.0)
    assert (result[lengths_R == 0] == 0).all()
    means = {"token-mean": 1.0, "token-sum": sum(lengths), "seq-mean-token-mean": 1.0}
    of_sums = sum(lengths) / max(1, totals.completions)
    expected = means | {"seq-mean-token-sum": of_sums, "seq-mean-token-sum-norm": of_sums / 4}
    assert name in expected, "a new aggregation: say here what its factors add up to"
    total = float((result * lengths_R).sum())
    assert total == pytest.approx(ranks * expected[name] if sum(lengths) else 0.0)
