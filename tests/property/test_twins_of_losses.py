"""Every registered loss, divergence and selector equals a naive twin.

test_properties_of_losses shows that junk, order and the division into micro-batches change nothing.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.twins import divergence as divergence_twins
from tests.twins import losses as twins
from tests.twins import selection as selection_twins
from tests.twins.losses import Token
from workers.train.algorithms.divergence import DIVERGENCES, divergence
from workers.train.algorithms.losses import LOSSES, LossInputs, LossOutput, policy_loss, value_loss
from workers.train.algorithms.sequences import Sequences
from workers.train.algorithms.token_selection import SELECTORS, m2po, select_tokens

torch.set_num_threads(1)

JUNK = (math.nan, math.inf, -math.inf, 1e30, -1e30)
EXTREMES = (24.3, -27.1, 100.0, -100.0)
"""Log-ratios beyond the bound."""

numbers = st.floats(-2, 2)
log_ratios = st.one_of(st.floats(-3, 3).map(lambda number: round(number, 6)), st.sampled_from(EXTREMES))
"""Zero or no smaller than 1e-6: `kl_cov` takes differences near the precision of the log-probs for rounding."""
each_loss = pytest.mark.parametrize("name", LOSSES)


@dataclass(frozen=True)
class Case:
    """Rows of completions in some order; `None` is a position outside the mask."""

    rows: list[tuple[int, list[Token | None]]]

    def completion(self, number: int) -> list[Token]:
        return [token for owner, row in self.rows if owner == number for token in row if token]

    @property
    def completions(self) -> list[int]:
        return sorted({owner for owner, _ in self.rows})


@st.composite
def tokens(draw: st.DrawFn, factor: float) -> Token | None:
    if draw(st.integers(0, 3)) == 0:
        return None
    logprob = draw(st.floats(-8, 0))
    return Token(
        logprob=logprob,
        proximal=logprob - draw(log_ratios),
        advantage=draw(numbers),
        weight=draw(st.one_of(st.floats(0, 3), st.just(math.exp(20)))),
        chosen=draw(st.booleans()),
        factor=factor,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows: list[tuple[int, list[Token | None]]] = []
    for number in range(draw(st.integers(0, 4))):
        factor = draw(st.floats(0.01, 1))
        rows += [(number, row) for row in draw(st.lists(st.lists(tokens(factor), max_size=4), min_size=1, max_size=3))]
    return Case(draw(st.permutations(rows)))


def sheet(case: Case, name: str) -> Tensor:
    """Return a field of the tokens in the positions of the rows, and 0 elsewhere."""
    width = max((len(row) for _, row in case.rows), default=0) + 1
    values = [[float(getattr(token, name)) if token else 0.0 for token in row] for _, row in case.rows]
    laid = [row + [0.0] * (width - len(row)) for row in values]
    return torch.tensor(laid, dtype=torch.float64).reshape(len(case.rows), width)


def run(name: str, case: Case, options: dict) -> tuple[LossOutput, Tensor]:
    """Return the loss, and its gradient with respect to the log-probs."""
    logprobs = sheet(case, "logprob").requires_grad_()
    factors = [next((token.factor for token in row if token), 0.0) for _, row in case.rows]
    output = policy_loss(
        name,
        LossInputs(
            logprobs_RT=logprobs,
            proximal_RT=sheet(case, "proximal"),
            advantages_RT=sheet(case, "advantage"),
            weights_RT=sheet(case, "weight"),
            selected_RT=sheet(case, "chosen") != 0,
            sequences=Sequences(
                sheet(case, "factor") != 0, torch.tensor([owner for owner, _ in case.rows], dtype=torch.int64)
            ),
        ),
        torch.tensor(factors, dtype=torch.float64),
        options,
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output, gradient


def near(result: Tensor, expected: Tensor, relative: float = 1e-9) -> bool:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(result, expected, rtol=0, atol=relative * scale + 1e-300)


def test_every_registered_function_has_a_twin() -> None:
    assert set(LOSSES) == set(twins.TWINS)
    assert set(DIVERGENCES) == set(divergence_twins.TWINS)
    assert set(SELECTORS) == {"clip_cov", "kl_cov"}


@each_loss
@given(data=st.data())
def test_a_loss_and_its_gradient_equal_those_of_its_twin(name: str, data: st.DataObject) -> None:
    case, options = data.draw(cases()), data.draw(st.sampled_from(twins.OPTIONS[name]))
    output, gradient = run(name, case, options)
    expected = torch.zeros_like(gradient)
    shares = [0.0]
    for number in case.completions:
        completion = case.completion(number)
        if not completion:
            continue
        losses, slopes = twins.TWINS[name](completion, **options)
        shares += [token.factor * loss for token, loss in zip(completion, losses, strict=True)]
        rest = iter(slopes)
        for place, (owner, row) in enumerate(case.rows):
            for column, token in enumerate(row if owner == number else []):
                if token:
                    expected[place, column] = next(rest)
    assert abs(float(output.loss.detach()) - math.fsum(shares)) <= 1e-9 * sum(map(abs, shares)) + 1e-300
    assert near(gradient, expected)


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chosen", [False, True])
def test_log_ratios_of_a_hundred_give_a_finite_loss_and_gradient(name: str, dtype: torch.dtype, chosen: bool) -> None:
    log_ratio = torch.tensor([[100.0, -100.0, 100.0, -100.0], [100.0, 100.0, -100.0, 0.0]], dtype=dtype)
    for base in (-101.0, -1.0, 0.0):
        for options in twins.OPTIONS[name]:
            logprobs = torch.full_like(log_ratio, base, requires_grad=True)
            output = policy_loss(
                name,
                LossInputs(
                    logprobs_RT=logprobs,
                    proximal_RT=logprobs.detach() - log_ratio,
                    advantages_RT=torch.tensor([[1.0, 1.0, -1.0, -1.0], [-2.0, -2.0, 3.0, 3.0]], dtype=dtype),
                    weights_RT=torch.full_like(log_ratio, math.exp(20)),
                    selected_RT=torch.full_like(log_ratio, chosen, dtype=torch.bool),
                    sequences=Sequences(torch.ones_like(log_ratio, dtype=torch.bool), torch.tensor([0, 1])),
                ),
                torch.full((2,), 0.125, dtype=torch.float64),
                options,
            )
            (gradient,) = torch.autograd.grad(output.loss, logprobs)
            assert math.isfinite(float(output.loss.detach()))
            assert torch.isfinite(gradient).all()
            # exp(20) by weight and by ratio, times the largest advantage, with a margin for penalties.
            assert float(gradient.abs().max()) <= 4 * math.exp(40)
            assert all(math.isfinite(float(value)) for value in (output.sums | output.maxima).values())


@pytest.mark.parametrize("name", DIVERGENCES)
@given(pairs=st.lists(st.tuples(st.floats(-8, 0), log_ratios), min_size=1, max_size=6), junk=st.sampled_from(JUNK))
def test_a_divergence_and_its_gradient_equal_those_of_its_twin(
    name: str, pairs: list[tuple[float, float]], junk: float
) -> None:
    logprobs = torch.tensor([[p for p, _ in pairs] + [junk]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[p - d for p, d in pairs] + [junk]], dtype=torch.float64)
    mask = torch.tensor([[True] * len(pairs) + [False]])
    result = divergence(name, logprobs, reference, mask)
    (gradient,) = torch.autograd.grad(result.sum(), logprobs)
    result = result.detach()
    expected = [divergence_twins.TWINS[name](p, float(q)) for (p, _), q in zip(pairs, reference[0], strict=False)]
    values, slopes = zip(*expected, (0.0, 0.0), strict=True)
    assert torch.allclose(result[0], torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient[0], torch.tensor(slopes, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert float(result[0, -1]) == 0.0 == float(gradient[0, -1])
    if DIVERGENCES[name].traits.non_negative:
        assert (result >= 0).all()


COARSE = st.integers(-16, 16).map(lambda number: number / 8)
"""Draw numbers whose squares add up without rounding, so that ties are ties in any order."""
lines = st.lists(st.tuples(COARSE, COARSE, COARSE, st.booleans()), min_size=0, max_size=12)


def line(values: list[float], mask: list[bool], junk: float) -> Tensor:
    return torch.tensor([[v if m else junk for v, m in zip(values, mask, strict=True)]], dtype=torch.float64).reshape(
        1, -1
    )


def places(selected_RT: Tensor, mask: list[bool]) -> set[int]:
    """Return the indexes of the selected tokens within the mask; check that no token outside is selected."""
    chosen = selected_RT[0].tolist()
    assert not any(c and not m for c, m in zip(chosen, mask, strict=True))
    return {number for number, c in enumerate(c for c, m in zip(chosen, mask, strict=True) if m) if c}


@given(lines, st.sampled_from([0.0, 0.01, 0.25, 1.0, 3.0, math.inf]), st.sampled_from(JUNK), st.randoms())
def test_m2po_keeps_what_its_twin_keeps_in_any_order(drawn, threshold, junk, random) -> None:
    for _ in range(2):
        behaviour, proximal, _, mask = (list(column) for column in zip(*drawn, strict=True)) if drawn else ([],) * 4
        kept = m2po(
            line(behaviour, mask, junk),
            line(proximal, mask, junk),
            torch.tensor([mask]).bool().reshape(1, -1),
            threshold=threshold,
        )
        valid = [(b, p) for b, p, m in zip(behaviour, proximal, mask, strict=True) if m]
        expected = selection_twins.m2po([b for b, _ in valid], [p for _, p in valid], threshold=threshold)
        assert places(kept, mask) == expected
        assert bool(expected) == any(mask)
        random.shuffle(drawn)


@given(lines, st.sampled_from([0.0002, 0.25, 0.5, 1.0]), st.sampled_from(JUNK))
def test_kl_cov_chooses_what_its_twin_chooses(drawn, share, junk) -> None:
    logprobs, proximal, advantages, mask = (list(column) for column in zip(*drawn, strict=True)) if drawn else ([],) * 4
    chosen = select_tokens(
        "kl_cov",
        line(logprobs, mask, junk),
        line(proximal, mask, junk),
        line(advantages, mask, junk),
        torch.tensor([mask]).bool().reshape(1, -1),
        None,
        {"kl_cov_ratio": share},
    )
    valid = [(a, p) for a, p, m in zip(advantages, logprobs, mask, strict=True) if m]
    expected = (
        selection_twins.kl_cov([a for a, _ in valid], [p for _, p in valid], kl_cov_ratio=share) if valid else set()
    )
    assert places(chosen, mask) == expected


@given(lines, st.sampled_from([0.0002, 0.25, 0.5, 1.0]), st.sampled_from(JUNK), st.integers(0, 99))
def test_clip_cov_chooses_the_full_number_among_its_twins_candidates(drawn, share, junk, seed) -> None:
    logprobs, proximal, advantages, mask = (list(column) for column in zip(*drawn, strict=True)) if drawn else ([],) * 4
    bounds = {"clip_low": 0.21, "clip_high": 0.29, "clip_cov_low": 0.0501, "clip_cov_high": 0.9001}

    def choose(outside: float) -> Tensor:
        return select_tokens(
            "clip_cov",
            line(logprobs, mask, outside),
            line(proximal, mask, outside),
            line(advantages, mask, outside),
            torch.tensor([mask]).bool().reshape(1, -1),
            torch.Generator().manual_seed(seed),
            bounds | {"clip_cov_ratio": share},
        )

    chosen = choose(junk)
    assert torch.equal(chosen, choose(0.0))
    valid = [(a, p, q) for a, p, q, m in zip(advantages, logprobs, proximal, mask, strict=True) if m]
    if not valid:
        assert not chosen.any()
        return
    candidates = selection_twins.clip_cov_candidates(*(list(column) for column in zip(*valid, strict=True)), **bounds)
    assert places(chosen, mask) <= candidates
    assert int(chosen.sum()) == min(len(candidates), max(1, int(share * len(valid))))


@given(lines, st.sampled_from([0.26, 0.51, math.inf]), st.sampled_from(JUNK))
def test_a_value_loss_and_its_gradient_equal_those_of_its_twin(drawn, clip, junk) -> None:
    values, old, targets, mask = (list(column) for column in zip(*drawn, strict=True)) if drawn else ([],) * 4

    def run_value(outside: float) -> tuple[LossOutput, Tensor]:
        now = line(values, mask, outside).requires_grad_()
        output = value_loss(
            now,
            line(old, mask, outside),
            line(targets, mask, outside),
            torch.tensor([mask]).bool().reshape(1, -1),
            torch.tensor([0.5 if any(mask) else outside], dtype=torch.float64),
            clip=clip,
        )
        return output, torch.autograd.grad(output.loss, now)[0]

    (output, gradient), (clean, clean_gradient) = run_value(junk), run_value(0.0)
    assert torch.equal(output.loss, clean.loss)
    assert torch.equal(gradient, clean_gradient)
    twin = [twins.value_loss(v, o, t, clip) if m else (0.0, 0.0) for v, o, t, m in drawn]
    assert float(output.loss.detach()) == pytest.approx(0.5 * math.fsum(loss for loss, _ in twin))
    assert torch.allclose(
        gradient, torch.tensor([[0.5 * slope for _, slope in twin]], dtype=torch.float64).reshape(1, -1)
    )
