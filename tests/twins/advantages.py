"""Naive twins of the estimators: one completion, one group, one token at a time.

They are written from the formulas, not from the code that they check. Sums and means are exact (`Fraction`), so any
rounding error is in the code under test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

Line = list[float]


@dataclass(frozen=True)
class Case:
    """A batch in plain lists: one entry per completion, rows of equal length for tokens."""

    groups: list[int]
    rewards: list[float]
    valid: list[bool]
    lengths: list[int]
    loss_lengths: list[int]
    """Lengths of the completions that bear loss; 0 for the others."""
    parts: list[Line]
    """One list per part of the reward, each with one entry per completion."""
    part_weights: list[float]
    correct: list[bool]
    mask: list[list[bool]] = field(default_factory=list)
    token_rewards: list[Line] = field(default_factory=list)
    values: list[Line] = field(default_factory=list)
    bootstrap: list[float] = field(default_factory=list)
    greedy: list[float] = field(default_factory=list)
    old_logprobs: list[Line] = field(default_factory=list)
    sum_pi_squared: list[Line] = field(default_factory=list)
    weights: list[Line] = field(default_factory=list)

    def siblings(self, i: int) -> list[int]:
        """Return the members of B in the same group, including the completion itself."""
        return [j for j in range(len(self.groups)) if self.valid[j] and self.groups[j] == self.groups[i]]


TWINS: dict[str, Callable[..., object]] = {}
"""Twins by the registry's names."""


def twin(function: Callable[..., object]) -> Callable[..., object]:
    TWINS[function.__name__] = function
    return function


def mean_of(values: Sequence[float]) -> Fraction:
    return sum((Fraction(v) for v in values), Fraction(0)) / len(values)


def std_of(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = mean_of(values)
    return math.sqrt(sum((Fraction(v) - mean) ** 2 for v in values) / (len(values) - 1))


def each(case: Case, advantage: Callable[[int, list[int]], float]) -> list[float]:
    """Compute one number per completion of B from its index and its siblings'; 0 for the others."""
    return [float(advantage(i, case.siblings(i))) if case.valid[i] else 0.0 for i in range(len(case.groups))]


@twin
def grpo(case: Case, *, normalize_std: bool, leave_one_out: bool, epsilon: float, rewards: Line | None = None) -> Line:
    r = case.rewards if rewards is None else rewards

    def advantage(i: int, siblings: list[int]) -> float:
        others = [r[j] for j in siblings if j != i]
        if not others:
            return 0.0
        difference = Fraction(r[i]) - mean_of(others if leave_one_out else [r[j] for j in siblings])
        return float(difference) / (std_of([r[j] for j in siblings]) + epsilon if normalize_std else 1.0)

    return each(case, advantage)


@twin
def dr_grpo(case: Case) -> Line:
    r = case.rewards
    return each(case, lambda i, siblings: Fraction(r[i]) - mean_of([r[j] for j in siblings]))


@twin
def rloo(case: Case) -> Line:
    r = case.rewards

    def advantage(i: int, siblings: list[int]) -> float:
        others = [r[j] for j in siblings if j != i]
        return Fraction(r[i]) - mean_of(others) if others else 0.0

    return each(case, advantage)


@twin
def opo(case: Case) -> Line:
    r, length = case.rewards, case.lengths

    def advantage(i: int, siblings: list[int]) -> float:
        total = sum(length[j] for j in siblings)
        return Fraction(r[i]) - sum(Fraction(r[j]) * length[j] for j in siblings) / total if total else 0.0

    return each(case, advantage)


@twin
def gpg(case: Case, *, f_norm: float) -> Line:
    r = case.rewards
    batch = [i for i in range(len(r)) if case.valid[i] and case.loss_lengths[i] > 0]
    alpha = len(batch) / max(1, sum(r[i] != 0 for i in batch))
    return each(case, lambda i, siblings: alpha * (Fraction(r[i]) - mean_of([r[j] for j in siblings])) / f_norm)


@twin
def grpo_passk(case: Case, *, normalize_std: bool, epsilon: float) -> Line:
    r = case.rewards

    def advantage(i: int, siblings: list[int]) -> float:
        others = [r[j] for j in siblings if j != i]
        if not others or r[i] <= max(others):
            return 0.0
        return (r[i] - max(others)) / (std_of([r[j] for j in siblings]) + epsilon if normalize_std else 1.0)

    return each(case, advantage)


@twin
def passk(case: Case, *, k: int) -> Line:
    def advantage(i: int, siblings: list[int]) -> float:
        n, wrong = len(siblings), sum(not case.correct[j] for j in siblings)
        if n < k:
            return 0.0
        p = 1 - Fraction(math.comb(wrong, k), math.comb(n, k))
        if p in (0, 1):
            return 0.0
        # Mean of pass@k over the draws that contain this completion, minus the mean over all draws.
        own = 1 if case.correct[i] else 1 - Fraction(math.comb(wrong - 1, k - 1), math.comb(n - 1, k - 1))
        return float(own - p) / math.sqrt(p * (1 - p))

    return each(case, advantage)


@twin
def max_rl(case: Case, *, epsilon: float) -> Line:
    r = case.rewards

    def advantage(i: int, siblings: list[int]) -> float:
        mean = mean_of([r[j] for j in siblings])
        return float(Fraction(r[i]) - mean) / (float(mean) + epsilon) if mean > 0 else 0.0

    return each(case, advantage)


def whitened(values: Line, votes: list[int], inside: list[bool]) -> Line:
    """Whiten over tokens: each value counts once per vote."""
    tokens = [v for v, n, counts in zip(values, votes, inside, strict=True) if counts for _ in range(n)]
    if not tokens:
        return [0.0] * len(values)
    mean = mean_of(tokens)
    variance = sum((Fraction(t) - mean) ** 2 for t in tokens) / max(1, len(tokens) - 1)
    return [
        float(Fraction(v) - mean) / math.sqrt(float(variance) + 1e-8) if counts else 0.0
        for v, counts in zip(values, inside, strict=True)
    ]


def about_completions(whitened: Line, counted: list[bool]) -> Line:
    """Subtract the mean of the counted values, one per completion that bears loss."""
    mean = mean_of([v for v, counts in zip(whitened, counted, strict=True) if counts]) if any(counted) else 0
    return [float(Fraction(v) - mean) for v in whitened]


def whitened_completions(case: Case, values: Line, center: str) -> Line:
    found = whitened(values, case.loss_lengths, case.valid)
    if center == "completions":
        bearing = [valid and n > 0 for valid, n in zip(case.valid, case.loss_lengths, strict=True)]
        found = about_completions(found, bearing)
    return [v if valid else 0.0 for v, valid in zip(found, case.valid, strict=True)]


@twin
def reinforce_plus_plus_baseline(case: Case, *, center: str) -> Line:
    return whitened_completions(case, dr_grpo(case), center)


@twin
def gdpo(case: Case, *, epsilon: float, center: str) -> Line:
    total = [0.0] * len(case.groups)
    for part, weight in zip(case.parts, case.part_weights, strict=True):
        normal = grpo(case, normalize_std=True, leave_one_out=False, epsilon=epsilon, rewards=part)
        total = [t + weight * a for t, a in zip(total, normal, strict=True)]
    return whitened_completions(case, total, center)


Sheets = tuple[list[Line], list[Line]]


def steps(case: Case, i: int) -> list[int]:
    """Return the positions of a completion's tokens that count, in order."""
    return [t for t, counts in enumerate(case.mask[i]) if counts]


def on_sheet(case: Case, value_at: dict[tuple[int, int], float]) -> list[Line]:
    return [[value_at.get((i, t), 0.0) for t in range(len(line))] for i, line in enumerate(case.mask)]


def finished(
    case: Case,
    advantages: dict[tuple[int, int], float],
    returns: dict[tuple[int, int], float],
    *,
    whiten: bool = False,
    center: str = "tokens",
):
    if whiten:
        flat = whitened(list(advantages.values()), [1] * len(advantages), [True] * len(advantages))
        if center == "completions":
            flat = about_completions(flat, [t == steps(case, i)[0] for i, t in advantages])
        advantages = dict(zip(advantages, flat, strict=True))
    return on_sheet(case, advantages), on_sheet(case, returns)


@twin
def gae(case: Case, *, discount: float, gae_lambda: float, whiten: bool, center: str) -> Sheets:
    advantages, returns = {}, {}
    for i in range(len(case.mask)):
        places = steps(case, i)
        values = [case.values[i][t] for t in places] + [case.bootstrap[i]]
        errors = [case.token_rewards[i][t] + discount * values[n + 1] - values[n] for n, t in enumerate(places)]
        for n, t in enumerate(places):
            later = range(n, len(places))
            advantages[i, t] = math.fsum((discount * gae_lambda) ** (m - n) * errors[m] for m in later)
            returns[i, t] = advantages[i, t] + values[n]
    return finished(case, advantages, returns, whiten=whiten, center=center)


@twin
def reinforce_plus_plus(case: Case, *, discount: float, whiten: bool, center: str) -> Sheets:
    returns = {}
    for i in range(len(case.mask)):
        places = steps(case, i)
        for n, t in enumerate(places):
            later = enumerate(places[n:])
            returns[i, t] = math.fsum(discount**ahead * case.token_rewards[i][place] for ahead, place in later)
    return finished(case, returns, returns, whiten=whiten, center=center)


def to_go(case: Case, i: int, t: int) -> float:
    return math.fsum(case.token_rewards[i][place] for place in steps(case, i) if place >= t)


@twin
def remax(case: Case) -> Sheets:
    tokens = [(i, t) for i in range(len(case.mask)) for t in steps(case, i)]
    returns = {(i, t): to_go(case, i, t) for i, t in tokens}
    return finished(case, {(i, t): g - case.greedy[i] for (i, t), g in returns.items()}, returns)


def energy(case: Case, i: int, t: int) -> float:
    """Return the energy of the gradient up to and including token t."""
    return math.fsum(
        (1 - 2 * math.exp(case.old_logprobs[i][p]) + case.sum_pi_squared[i][p]) * case.weights[i][p] ** 2
        for p in steps(case, i)
        if p <= t
    )


def token_baseline(
    case: Case, place: Callable[[int, int], int], token_at: Callable[[int, int], int | None], *, zero_tail, epsilon
) -> Sheets:
    """Compute advantages; `place` numbers a completion's tokens, `token_at` finds that number in another completion."""
    advantages, returns = {}, {}
    for i in range(len(case.mask)):
        if not case.valid[i]:
            continue
        siblings = [j for j in case.siblings(i) if steps(case, j)]
        others = max((len(steps(case, j)) for j in siblings if j != i), default=0)
        for t in steps(case, i):
            met = [(j, token_at(j, place(i, t))) for j in siblings]
            met = [(j, s) for j, s in met if s is not None]
            above = math.fsum(to_go(case, j, s) * energy(case, j, s) for j, s in met)
            below = math.fsum(energy(case, j, s) for j, s in met) + epsilon
            alone = len(siblings) == 1
            tail = zero_tail and len(steps(case, i)) > others and place(i, t) >= others
            returns[i, t] = to_go(case, i, t)
            advantages[i, t] = returns[i, t] - (0.0 if alone or tail else above / below)
    return finished(case, advantages, returns)


@twin
def optimal_token_baseline(case: Case, *, zero_tail: bool, epsilon: float) -> Sheets:
    return token_baseline(
        case, lambda _, t: t, lambda j, t: t if case.mask[j][t] else None, zero_tail=zero_tail, epsilon=epsilon
    )


@twin
def tir_optimal_token_baseline(case: Case, *, zero_tail: bool, epsilon: float) -> Sheets:
    return token_baseline(
        case,
        lambda i, t: steps(case, i).index(t),
        lambda j, n: steps(case, j)[n] if n < len(steps(case, j)) else None,
        zero_tail=zero_tail,
        epsilon=epsilon,
    )
