"""Naive twins of the policy losses: a loop over tokens in Python floats, with the derivative worked out by hand.

A twin takes the loss tokens of one completion. It returns the loss of each, and the derivative of the sum of factor
times loss by each token's log-prob. Weights are applied.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Twin = Callable[..., tuple[list[float], list[float]]]
TWINS: dict[str, Twin] = {}
OPTIONS: dict[str, list[dict[str, Any]]] = {}
"""Sets of options to compare each loss under."""


@dataclass(frozen=True)
class Token:
    logprob: float
    proximal: float
    advantage: float
    weight: float = 1.0
    chosen: bool = False
    factor: float = 1.0


def twin(name: str, *options: dict[str, Any]) -> Callable[[Twin], Twin]:
    def enter(function: Twin) -> Twin:
        TWINS[name] = function
        OPTIONS[name] = list(options)
        return function

    return enter


def by_token(rule: Callable[..., tuple[float, float]]) -> Twin:
    """Make a twin from a rule that returns one token's loss and its derivative by that token's log-prob."""

    def twin_of_rule(tokens: list[Token], **options: Any) -> tuple[list[float], list[float]]:
        losses, gradient = [], []
        for token in tokens:
            loss, slope = rule(token, **options)
            losses.append(token.weight * loss)
            gradient.append(token.factor * token.weight * slope)
        return losses, gradient

    return twin_of_rule


def exponential(x: float, low: float = -20.0, high: float = 20.0) -> tuple[float, float]:
    """Return exp of x clamped to bounds, and its derivative."""
    if x < low:
        return math.exp(low), 0.0
    if x > high:
        return math.exp(high), 0.0
    return math.exp(x), math.exp(x)


def ratio_of(token: Token) -> tuple[float, float]:
    return exponential(token.logprob - token.proximal)


def ppo(advantage: float, ratio: float, low: float, high: float) -> tuple[float, float]:
    """Return -min(r A, clip(r) A), and its derivative by r."""
    if advantage > 0 and ratio > 1 + high:
        return -advantage * (1 + high), 0.0
    if advantage < 0 and ratio < 1 - low:
        return -advantage * (1 - low), 0.0
    return -advantage * ratio, -advantage


def dual(advantage: float, loss: tuple[float, float], bound: float) -> tuple[float, float]:
    if bound and advantage < 0 and loss[0] > -advantage * bound:
        return -advantage * bound, 0.0
    return loss


def clipped_token(token: Token, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> tuple[float, float]:
    ratio, growth = ratio_of(token)
    loss, slope = dual(token.advantage, ppo(token.advantage, ratio, clip_low, clip_high), dual_clip)
    return loss, slope * growth


@twin(
    "clipped",
    {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0, "level": "token"},
    {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5, "level": "token"},
    {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 0.0, "level": "sequence"},
    {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2, "level": "sequence"},
)
def clipped(
    tokens: list[Token], *, clip_low: float, clip_high: float, dual_clip: float, level: str
) -> tuple[list[float], list[float]]:
    if level == "token":
        return by_token(clipped_token)(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    number = len(tokens)
    advantage = sum(token.advantage for token in tokens) / number
    ratio, growth = exponential(sum(token.logprob - token.proximal for token in tokens) / number)
    loss, slope = dual(advantage, ppo(advantage, ratio, clip_low, clip_high), dual_clip)
    whole = sum(token.factor * token.weight for token in tokens)
    return [token.weight * loss for token in tokens], [whole * slope * growth / number for _ in tokens]


twin("dapo", {"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.1, "clip_high": 2.0})(by_token(clipped_token))


@twin("clip_cov", {"clip_low": 0.2, "clip_high": 0.28})
@by_token
def clip_cov(token: Token, **options: float) -> tuple[float, float]:
    return (0.0, 0.0) if token.chosen else clipped_token(token, **options)


@twin("kl_cov", {"kl_cov_coefficient": 0.1}, {"kl_cov_coefficient": 3.0})
@by_token
def kl_cov(token: Token, *, kl_cov_coefficient: float) -> tuple[float, float]:
    ratio, growth = ratio_of(token)
    loss, slope = -token.advantage * ratio, -token.advantage * growth
    if token.chosen:
        distance = token.logprob - token.proximal
        loss += kl_cov_coefficient * abs(distance)
        slope += kl_cov_coefficient * ((distance > 0) - (distance < 0))
    return loss, slope


@twin(
    "sapo",
    {"tau_positive": 1.0, "tau_negative": 1.05, "level": "token"},
    {"tau_positive": 3.0, "tau_negative": 0.4, "level": "token"},
    {"tau_positive": 1.0, "tau_negative": 1.05, "level": "sequence"},
    {"tau_positive": 3.0, "tau_negative": 0.4, "level": "sequence"},
)
def sapo(
    tokens: list[Token], *, tau_positive: float, tau_negative: float, level: str
) -> tuple[list[float], list[float]]:
    groups = [[token] for token in tokens] if level == "token" else [tokens]
    losses, gradient = [], []
    for group in groups:
        advantage = sum(token.advantage for token in group) / len(group)
        ratio, growth = exponential(sum(token.logprob - token.proximal for token in group) / len(group))
        tau = tau_positive if advantage > 0 else tau_negative
        gate = 1 / (1 + math.exp(max(-700.0, -tau * (ratio - 1))))
        losses += [token.weight * -advantage * 4 / tau * gate for token in group]
        slope = -advantage * 4 * gate * (1 - gate) * growth / len(group)
        gradient += [sum(token.factor * token.weight for token in group) * slope] * len(group)
    return losses, gradient


@twin("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": 0.2, "clip_high": 0.3})
def gspo(tokens: list[Token], *, clip_low: float, clip_high: float) -> tuple[list[float], list[float]]:
    mean = sum(token.logprob - token.proximal for token in tokens) / len(tokens)
    ratio, growth = exponential(mean, high=10.0)
    losses, gradient = [], []
    for token in tokens:
        loss, slope = ppo(token.advantage, ratio, clip_low, clip_high)
        losses.append(token.weight * loss)
        gradient.append(token.factor * token.weight * slope * growth)
    return losses, gradient


@twin("geo_mean", {"clip_low": 0.4, "clip_high": 0.4}, {"clip_low": 0.1, "clip_high": 1.0})
def geo_mean(tokens: list[Token], *, clip_low: float, clip_high: float) -> tuple[list[float], list[float]]:
    number = len(tokens)
    exponent, slopes, weight, advantage = 0.0, [], 0.0, 0.0
    for token in tokens:
        raw = token.logprob - token.proximal
        taken, slope = max(-20.0, min(20.0, raw)), float(-20 <= raw <= 20)
        if token.advantage > 0 and raw > clip_high:
            taken, slope = clip_high, 0.0
        elif token.advantage < 0 and raw < -clip_low:
            taken, slope = -clip_low, 0.0
        elif token.advantage == 0:
            taken, slope = 0.0, 0.0
        exponent += taken / number
        slopes.append(slope)
        weight += math.log(max(token.weight, 1e-10)) / number
        advantage += token.advantage / number
    loss = -advantage * math.exp(exponent) * math.exp(weight)
    whole = sum(token.factor for token in tokens)
    return [loss for _ in tokens], [whole * loss * slope / number for slope in slopes]


@by_token
def policy_gradient(token: Token) -> tuple[float, float]:
    return -token.advantage * token.logprob, -token.advantage


twin("reinforce", {})(policy_gradient)
twin("gpg", {})(policy_gradient)


@twin("cispo", {"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 1.0, "clip_high": 4.0})
@by_token
def cispo(token: Token, *, clip_low: float, clip_high: float) -> tuple[float, float]:
    weight = max(1 - clip_low, min(1 + clip_high, ratio_of(token)[0]))
    return -weight * token.advantage * token.logprob, -weight * token.advantage


def capped(token: Token, kept: bool, cap: float) -> tuple[float, float]:
    weight = min(cap, ratio_of(token)[0]) if kept else 0.0
    return -token.advantage * weight * token.logprob, -token.advantage * weight


@twin(
    "dppo_tv",
    {"clip_low": 0.15, "clip_high": 0.15, "ratio_cap": 20.0},
    {"clip_low": 0.0501, "clip_high": 0.3001, "ratio_cap": 1.5},
)
@by_token
def dppo_tv(token: Token, *, clip_low: float, clip_high: float, ratio_cap: float) -> tuple[float, float]:
    now, old = math.exp(min(0.0, token.logprob)), math.exp(min(0.0, token.proximal))
    kept = now - old <= clip_high if token.advantage > 0 else old - now <= clip_low
    return capped(token, kept, ratio_cap)


@twin(
    "dppo_kl",
    {"clip_low": 0.05, "clip_high": 0.05, "ratio_cap": 20.0},
    {"clip_low": 0.0101, "clip_high": 0.2001, "ratio_cap": 1.5},
)
@by_token
def dppo_kl(token: Token, *, clip_low: float, clip_high: float, ratio_cap: float) -> tuple[float, float]:
    now, old = math.exp(min(0.0, token.logprob)), math.exp(min(0.0, token.proximal))
    this = old * (token.proximal - token.logprob)
    divergence = this + (1 - old) * math.log((1 - old + 1e-8) / (1 - now + 1e-8))
    away = now > old if token.advantage > 0 else now < old
    bound = clip_high if token.advantage > 0 else clip_low
    return capped(token, not away or divergence <= bound, ratio_cap)


@twin("dro", {"dro_beta": 0.5}, {"dro_beta": 0.1})
@by_token
def dro(token: Token, *, dro_beta: float) -> tuple[float, float]:
    distance = token.logprob - token.proximal
    loss = -(token.advantage * token.logprob - dro_beta / 2 * distance * distance)
    return loss, -(token.advantage - dro_beta * distance)


def value_loss(value: float, old: float, target: float, clip: float) -> tuple[float, float]:
    """Return one token's loss, 0.5 max of the clipped and unclipped squares, and its derivative."""
    held = min(max(value, old - clip), old + clip)
    if (held - target) ** 2 > (value - target) ** 2:
        return 0.5 * (held - target) ** 2, 0.0
    return 0.5 * (value - target) ** 2, value - target
