"""Naive twins of the divergences: one token's value, and its derivative by the log-prob, in Python floats."""

import math
from collections.abc import Callable


def k1(logprob: float, reference: float) -> tuple[float, float]:
    return logprob - reference, 1.0


def k2(logprob: float, reference: float) -> tuple[float, float]:
    distance = logprob - reference
    return distance * distance / 2, distance


def k3(logprob: float, reference: float) -> tuple[float, float]:
    distance = reference - logprob
    held = max(-20.0, min(20.0, distance))
    value = math.exp(held) - held - 1
    if value > 10:
        return 10.0, 0.0
    return value, 1 - math.exp(held) if held == distance else 0.0


def absolute(logprob: float, reference: float) -> tuple[float, float]:
    distance = logprob - reference
    if abs(distance) <= 1e-12 * abs(logprob):  # equal but for rounding, so it has no sign
        return 0.0, 0.0
    return abs(distance), float((distance > 0) - (distance < 0))


def with_gradient_of_k2(
    rule: Callable[[float, float], tuple[float, float]],
) -> Callable[[float, float], tuple[float, float]]:
    return lambda logprob, reference: (rule(logprob, reference)[0], k2(logprob, reference)[1])


TWINS = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": with_gradient_of_k2(k1),
    "k3+": with_gradient_of_k2(k3),
    "abs+": with_gradient_of_k2(absolute),
}
