"""The file's words around rollout correction: thresholds, rules, weights, presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from tests.conformance.cases import Case, NotMappedError, named
from workers.train.algorithms.correction import (
    IMPORTANCE_LEVELS,
    REJECTIONS,
    ImportanceWeights,
    RejectionRule,
    importance_weights,
    reject,
)
from workers.train.algorithms.correction_metrics import correction_metrics
from workers.train.algorithms.sequences import Sequences, log_ratios

PEER_NOISE: Final = 1e-4
"""The file's standard deviations are sqrt(E[x^2] - E[x]^2) with 1e-8 added to the number of tokens: that of equal
numbers, which is 0, comes out as up to this times the number."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """What is left of a batch, and with which weights."""

    kept_RT: Tensor
    weights: ImportanceWeights | None
    metrics: Mapping[str, Any]


def rules_of(config: Mapping[str, Any]) -> list[RejectionRule]:
    """verl's `rollout_rs` and its thresholds as our rules: one number for each, or one for all."""
    if not config.get("rollout_rs"):
        return []
    names = [name.strip() for name in config["rollout_rs"].split(",")]
    bounds = [bound.strip() for bound in str(config["rollout_rs_threshold"]).split(",")]
    bounds *= len(names) if len(bounds) == 1 else 1
    if len(bounds) != len(names):
        raise NotMappedError(f"{len(bounds)} thresholds for {len(names)} rules")
    return [_rule(name, bound) for name, bound in zip(names, bounds, strict=True)]


def _rule(name: str, bound: str) -> RejectionRule:
    named(REJECTIONS, name, "rejection rule")
    lower, _, upper = bound.rpartition("_")
    if name.endswith("k1"):
        # One number stands for itself and its inverse.
        return RejectionRule(name, float(lower) if lower else 1 / float(upper), float(upper))
    return RejectionRule(name, 0.0, float(upper))


def bounds_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """verl's threshold and normalisation as our options: a number truncates, "lower_upper" sets to zero outside."""
    lower, _, upper = str(config.get("rollout_is_threshold", 2.0)).rpartition("_")
    return {
        "lower": float(lower) if lower else 0.0,
        "upper": float(upper),
        "out_of_range": "zero" if lower else "truncate",
        "normalize": bool(config.get("rollout_is_batch_normalize", False)),
    }


def weights_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """verl's `rollout_is` as our options; None for no weights."""
    level = config.get("rollout_is")
    if level is None or config.get("rollout_is_threshold", 2.0) is None:
        return None
    named(IMPORTANCE_LEVELS, level, "level of importance weights")
    return {"level": level, **bounds_of(config)}


def correct(
    old_logprobs_RT: Tensor, rollout_logprobs_RT: Tensor, mask_RT: Tensor, config: Mapping[str, Any]
) -> Corrected:
    """Reject, weigh the survivors, compute metrics; every row is a completion.

    The file's metrics, including those of the weights, are over the tokens before rejection.
    """
    ids_R = torch.arange(len(mask_RT))
    options = weights_of(config)
    rejection = reject(rules_of(config), log_ratios(old_logprobs_RT, rollout_logprobs_RT, Sequences(mask_RT, ids_R)))
    surviving = _weights(old_logprobs_RT, rollout_logprobs_RT, rejection.kept_RT, ids_R, options)
    metrics = correction_metrics(
        old_logprobs_RT,
        rollout_logprobs_RT,
        log_ratios(old_logprobs_RT, rollout_logprobs_RT, Sequences(mask_RT, ids_R)),
        rejection=rejection if rejection.rules else None,
        weights=_weights(old_logprobs_RT, rollout_logprobs_RT, mask_RT, ids_R, options),
    )
    return Corrected(rejection.kept_RT, surviving, metrics)


def _weights(
    old_logprobs_RT: Tensor,
    rollout_logprobs_RT: Tensor,
    mask_RT: Tensor,
    ids_R: Tensor,
    options: Mapping[str, Any] | None,
) -> ImportanceWeights | None:
    return (
        None
        if options is None
        else importance_weights(log_ratios(old_logprobs_RT, rollout_logprobs_RT, Sequences(mask_RT, ids_R)), **options)
    )


def expect_metrics(case: Case, metrics: Mapping[str, Tensor], prefix: str = "") -> None:
    """Compare the metrics of the correction, which bear this prefix in the case."""
    for name, expected in case.get("expected_metrics", {}).items():
        if not name.startswith(prefix):
            continue
        ours = metrics.get(name.removeprefix(prefix))
        noise = 0.0
        if ours is not None and name.endswith("_std") and float(ours) < 1e-12:
            mean = metrics.get(name.removeprefix(prefix).removesuffix("std") + "mean", ours)
            noise = PEER_NOISE * abs(float(mean))
        case.expect(f"expected_metrics.{name}", ours, expected, noise=noise)
