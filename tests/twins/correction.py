"""Naive twins of rollout correction, its metrics, pass@k, shaping and filters: plain floats, one completion at a time.

A completion is the list of its tokens in the mask, over all of its rows: `(train, rollout)` log-probs. A completion
without such tokens is not in the batch. Rules and levels are written with ratios; the library uses their logs.
"""

import math
import statistics
from collections.abc import Callable
from fractions import Fraction

Batch = dict[int, list[tuple[float, float]]]
Kept = dict[int, list[bool]]
Weights = dict[int, list[float]]


def ratio(log_ratio: float) -> float:
    """Return pi / mu, bounded."""
    return math.exp(min(20.0, max(-20.0, log_ratio)))


def ratios(tokens: list[tuple[float, float]]) -> list[float]:
    return [ratio(train - rollout) for train, rollout in tokens]


def log_ratios(batch: Batch) -> list[float]:
    return [train - rollout for tokens in batch.values() for train, rollout in tokens]


# Rejection. A statistic is a number per token; a statistic of the completion is repeated on each of its tokens.


def k1(r: float) -> float:
    return math.log(1 / r)


def k2(r: float) -> float:
    return 0.5 * math.log(r) * math.log(r)


def k3(r: float) -> float:
    return (r - 1) - math.log(r)


def token(k: Callable[[float], float]) -> Callable[[list[float]], list[float]]:
    return lambda rs: [k(r) for r in rs]


def summed(k: Callable[[float], float]) -> Callable[[list[float]], list[float]]:
    return lambda rs: [sum(k(r) for r in rs)] * len(rs)


def averaged(k: Callable[[float], float]) -> Callable[[list[float]], list[float]]:
    return lambda rs: [sum(k(r) for r in rs) / len(rs)] * len(rs)


def largest(k: Callable[[float], float]) -> Callable[[list[float]], list[float]]:
    return lambda rs: [max(k(r) for r in rs)] * len(rs)


STATISTICS = {
    "token_k1": token(k1),
    "token_k2": token(k2),
    "token_k3": token(k3),
    "seq_sum_k1": summed(k1),
    "seq_sum_k2": summed(k2),
    "seq_sum_k3": summed(k3),
    "seq_mean_k1": averaged(k1),
    "seq_mean_k2": averaged(k2),
    "seq_mean_k3": averaged(k3),
    "seq_max_k2": largest(k2),
    "seq_max_k3": largest(k3),
    "m2po": token(lambda r: math.log(r) ** 2),
}


def reject(name: str, batch: Batch, lower: float, upper: float) -> Kept:
    """Return which tokens a rule keeps."""
    if name == "m2po":
        return second_moment(batch, upper)
    result = {}
    for number, tokens in batch.items():
        values = STATISTICS[name](ratios(tokens))
        if name.endswith("k1"):
            result[number] = [lower <= math.exp(value) <= upper for value in values]
        else:
            result[number] = [value <= upper for value in values]
    return result


def second_moment(batch: Batch, upper: float) -> Kept:
    """Keep tokens by ascending square, equal ones together, while the mean stays below the bound."""
    squares = {number: [math.log(r) ** 2 for r in ratios(tokens)] for number, tokens in batch.items()}
    every = [square for values in squares.values() for square in values]
    bound = min(every, default=0.0)
    for candidate in sorted(set(every)):
        taken = [square for square in every if square <= candidate]
        if sum(taken) / len(taken) >= upper:
            break
        bound = candidate
    return {number: [square <= bound for square in values] for number, values in squares.items()}


def surviving(batch: Batch, *kept: Kept) -> Batch:
    """Return the tokens that every rule keeps."""
    result = {}
    for number, tokens in batch.items():
        left = [token for place, token in enumerate(tokens) if all(each[number][place] for each in kept)]
        if left:
            result[number] = left
    return result


# Importance weights.

LEVELS: dict[str, Callable[[list[tuple[float, float]]], list[float]]] = {
    "token": ratios,
    "sequence": lambda tokens: [ratio(math.fsum(train - rollout for train, rollout in tokens))] * len(tokens),
}


def bounded(weight: float, lower: float, upper: float, out_of_range: str) -> float:
    if out_of_range == "zero":
        return weight if lower <= weight <= upper else 0.0
    return max(lower, min(upper, weight))


def weights(
    batch: Batch, *, level: str, lower: float, upper: float, out_of_range: str, normalize: bool
) -> tuple[Weights, float]:
    """Return the weight of each token, and its divisor."""
    result = {
        number: [bounded(raw, lower, upper, out_of_range) for raw in LEVELS[level](tokens)]
        for number, tokens in batch.items()
    }
    factor = 1.0
    if normalize and result:
        if level == "token":
            every = [weight for values in result.values() for weight in values]
        else:
            every = [values[0] for values in result.values()]
        factor = statistics.fmean(every) or 1.0
    return {number: [weight / factor for weight in values] for number, values in result.items()}, factor


# Metrics.


def share(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


def sample_std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def policy_metrics(batch: Batch) -> dict[str, float]:
    if not batch:
        return {}
    train = {number: statistics.fmean(t for t, _ in tokens) for number, tokens in batch.items()}
    rollout = {number: statistics.fmean(r for _, r in tokens) for number, tokens in batch.items()}
    apart = [rollout[number] - train[number] for number in batch]
    rs = [r for tokens in batch.values() for r in ratios(tokens)]
    return {
        "training_ppl": statistics.fmean(math.exp(-value) for value in train.values()),
        "training_log_ppl": -statistics.fmean(train.values()),
        "rollout_ppl": statistics.fmean(math.exp(-value) for value in rollout.values()),
        "rollout_log_ppl": -statistics.fmean(rollout.values()),
        "ppl_ratio": statistics.fmean(ratio(each) for each in apart),
        "log_ppl_diff": statistics.fmean(apart),
        "log_ppl_abs_diff": statistics.fmean(abs(each) for each in apart),
        "log_ppl_diff_max": max(apart),
        "log_ppl_diff_min": min(apart),
        "kl": -statistics.fmean(log_ratios(batch)),
        "k3_kl": statistics.fmean(k3(r) for r in rs),
        "chi2_token": statistics.fmean(r * r for r in rs) - 1,
        "chi2_seq": statistics.fmean(LEVELS["sequence"](tokens)[0] ** 2 for tokens in batch.values()) - 1,
    }


def rejection_metrics(batch: Batch, rules: list[tuple[str, float, float]]) -> dict[str, float]:
    if not batch or not rules:
        return {}
    kept = {name: reject(name, batch, lower, upper) for name, lower, upper in rules}
    result = {}
    for name, lower, upper in rules:
        low, high = (math.log(lower), math.log(upper)) if name.endswith("k1") else (-math.inf, upper)
        values = {number: STATISTICS[name](ratios(tokens)) for number, tokens in batch.items()}
        by_token = [value for each in values.values() for value in each]
        by_completion = [sum(each) / len(each) for each in values.values()]
        judged = [each[0] for each in values.values()] if name.startswith("seq") else by_token
        own = {"mean": statistics.fmean(by_token), "max": max(judged), "min": min(judged)}
        if name != "m2po":
            own["std"] = statistics.pstdev(min(high, max(low, value)) for value in by_token)
            own["fraction_high"] = share([value > high for value in judged])
            own["fraction_low"] = share([value < low for value in judged])
            own["seq_mean"] = statistics.fmean(by_completion)
            own["seq_std"] = sample_std(by_completion)
            own["seq_max"], own["seq_min"] = max(by_completion), min(by_completion)
            own["seq_max_deviation"] = max(abs(value) for value in by_completion)
            own["seq_fraction_high"] = share([value > high for value in by_completion])
            if name.endswith("k1"):
                own["seq_fraction_low"] = share([value < low for value in by_completion])
        own |= masked_fractions(batch, kept[name])
        result |= {f"rollout_rs_{name}_{key}": value for key, value in own.items()}
    together = {
        number: [all(each[number][place] for each in kept.values()) for place in range(len(tokens))]
        for number, tokens in batch.items()
    }
    return result | {f"rollout_rs_{key}": value for key, value in masked_fractions(batch, together).items()}


def masked_fractions(batch: Batch, kept: Kept) -> dict[str, float]:
    return {
        "masked_fraction": share([not flag for flags in kept.values() for flag in flags]),
        "seq_masked_fraction": share([not all(kept[number]) for number in batch]),
    }


def weight_metrics(
    batch: Batch, *, level: str, lower: float, upper: float, out_of_range: str, normalize: bool
) -> dict[str, float]:
    if not batch:
        return {}
    options = {"level": level, "lower": lower, "upper": upper, "out_of_range": out_of_range}
    kept, _ = weights(batch, **options, normalize=False)
    raw = {number: LEVELS[level](tokens) for number, tokens in batch.items()}
    w, raw_w = ([value for values in each.values() for value in values] for each in (kept, raw))
    by_completion = [statistics.fmean(values) for values in kept.values()]
    raw_by_completion = [statistics.fmean(values) for values in raw.values()]
    judged = raw_by_completion if level == "sequence" else raw_w
    extremes = raw_by_completion if level == "sequence" else w
    low = lower if out_of_range == "zero" or lower > 0 else 1 / upper
    square = statistics.fmean(value * value for value in w)
    result = {
        "mean": statistics.fmean(w),
        "std": statistics.pstdev(w),
        "max": max(extremes),
        "min": min(extremes),
        "eff_sample_size": statistics.fmean(w) ** 2 / square if square else 0.0,
        "ratio_fraction_high": share([value > upper for value in judged]),
        "ratio_fraction_low": share([value < low for value in judged]),
        "seq_mean": statistics.fmean(by_completion),
        "seq_std": sample_std(by_completion),
        "seq_max": max(by_completion),
        "seq_min": min(by_completion),
        "seq_max_deviation": max(abs(value - 1) for value in by_completion),
        "seq_fraction_high": share([value > upper for value in raw_by_completion]),
        "seq_fraction_low": share([value < low for value in raw_by_completion]),
    }
    if out_of_range == "zero":
        result["oob_ratio"] = share([not lower <= value <= upper for value in raw_w])
    if normalize:
        result["batch_norm_factor"] = weights(batch, **options, normalize=True)[1]
    return {f"rollout_is_{key}": value for key, value in result.items()}


# pass@k, shaping, filters.


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Return None for fewer than k attempts."""
    return float(1 - Fraction(math.comb(n - c, k), math.comb(n, k))) if n >= k else None


def clipped(reward: float, *, limit: float) -> float:
    return math.copysign(min(abs(reward), limit), reward)


def overlong(reward: float, length: int, cut_short: bool, *, max_length: int, tail: int, factor: float) -> float:
    over = length - (max_length - tail)
    penalty = factor * over / tail if over > 0 else 0.0
    return reward - (max(penalty, factor) if cut_short else penalty)


SHAPINGS: dict[str, Callable[..., float]] = {
    "clipped": lambda reward, _length, _cut, **options: clipped(reward, **options),
    "overlong": overlong,
}


def min_valid_rows(rewards: list[float], advantages: list[float], *, min_valid_rows: int) -> bool:
    return len(rewards) >= min_valid_rows


def zero_variance(rewards: list[float], advantages: list[float]) -> bool:
    return len(rewards) < 2 or any(reward != rewards[0] for reward in rewards)


def difficulty(
    rewards: list[float], advantages: list[float], *, min_mean_reward: float, max_mean_reward: float
) -> bool:
    if not rewards:
        return True
    mean = math.fsum(rewards) / len(rewards)
    at_bound = any(math.isclose(mean, bound, rel_tol=1e-12) for bound in (min_mean_reward, max_mean_reward))
    return at_bound or min_mean_reward <= mean <= max_mean_reward


def advantage_bounds(
    rewards: list[float], advantages: list[float], *, min_advantage: float, max_advantage: float
) -> bool:
    return not rewards or min_advantage <= max(abs(each) for each in advantages) <= max_advantage


FILTERS: dict[str, Callable[..., bool]] = {
    "min_valid_rows": min_valid_rows,
    "zero_variance": zero_variance,
    "difficulty": difficulty,
    "advantage_bounds": advantage_bounds,
}
