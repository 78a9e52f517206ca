"""Naive twins of token selection, on lists with one number per loss token."""

import math


def covariances(advantages: list[float], logprobs: list[float]) -> list[float]:
    number = len(advantages)
    mean_advantage, mean_logprob = sum(advantages) / number, sum(logprobs) / number
    return [(a - mean_advantage) * (p - mean_logprob) for a, p in zip(advantages, logprobs, strict=True)]


def kl_cov(advantages: list[float], logprobs: list[float], *, kl_cov_ratio: float) -> set[int]:
    """Return the indexes of the tokens of the largest covariance; of equal ones the first."""
    result = covariances(advantages, logprobs)
    ranked = sorted(range(len(result)), key=lambda place: (-result[place], place))
    return set(ranked[: max(1, int(kl_cov_ratio * len(result)))])


def clip_cov_candidates(
    advantages: list[float],
    logprobs: list[float],
    proximal: list[float],
    *,
    clip_low: float,
    clip_high: float,
    clip_cov_low: float,
    clip_cov_high: float,
) -> set[int]:
    """Return the indexes that the selector may choose from."""
    result = set()
    for place, covariance in enumerate(covariances(advantages, logprobs)):
        ratio = math.exp(max(-20.0, min(20.0, logprobs[place] - proximal[place])))
        up = advantages[place] > 0 and ratio > 1 + clip_high
        down = advantages[place] < 0 and ratio < 1 - clip_low
        if clip_cov_low < covariance < clip_cov_high and not up and not down:
            result.add(place)
    return result


def m2po(behaviour: list[float], proximal: list[float], *, threshold: float) -> set[int]:
    """Return the indexes kept: remove the largest, equal ones together, until the mean is below the threshold."""
    squares = {place: (p - b) ** 2 for place, (b, p) in enumerate(zip(behaviour, proximal, strict=True))}
    while squares and sum(squares.values()) / len(squares) >= threshold:
        largest = max(squares.values())
        rest = {place: square for place, square in squares.items() if square < largest}
        if not rest:
            break
        squares = rest
    return set(squares)
