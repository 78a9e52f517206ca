"""Families of rollout correction: weights, rejection, their metrics, and the published presets."""

from collections.abc import Mapping
from typing import Any, Final

from tests.conformance.cases import Case, family, named
from tests.conformance.corrections import bounds_of, correct, expect_metrics, rules_of, weights_of
from workers.settings.algorithm import PRESETS, Preset

LOSS_TYPES: Final = {"ppo_clip": "clipped", "reinforce": "reinforce"}


@family("rollout_correction")
def rollout_correction(case: Case) -> None:
    """What one configuration makes of the file's one batch."""
    check_correction(case.with_shared("rollout_correction_inputs"), peer=True)


def check_correction(case: Case, *, peer: bool = False) -> None:
    """Compare mask, weights, factor and metrics, as far as the case expects them.

    A peer keeps the weight of a rejected token, which is unused; ours is 0 there.
    """
    mask_RT = case.mask("mask") & case.mask("valid", [True] * len(case["mask"])).unsqueeze(1)
    result = correct(case.floats("train_log_prob"), case.floats("rollout_log_prob"), mask_RT, case["config"])
    if "expected_mask" in case.words:
        case.expect_mask("expected_mask", result.kept_RT)
    if "kept_rows" in case.words:
        kept = [row in case["kept_rows"] for row in range(len(mask_RT))]
        case.expect_mask("kept_rows", result.kept_RT.any(dim=1), kept)
    if case.get("expected_weights_masked") is not None:
        weights_RT = result.weights.weights_RT if result.weights else None
        case.expect("expected_weights_masked", weights_RT, within=result.kept_RT | ~mask_RT if peer else None)
    elif "expected_weights_masked" in case.words:
        case.compared.add("expected_weights_masked")
        if result.weights:
            case.refuse("expected_weights_masked", "ours has weights where none are expected")
    if "expected_norm_factor" in case.words:
        case.expect("expected_norm_factor", result.weights.normalizer if result.weights else None)
    case.compared.add("expected_metrics")
    expect_metrics(case, result.metrics)


@family("rollout_correction_presets")
def rollout_correction_presets(case: Case) -> None:
    """The settings behind a name: the case's, in our words, are ours."""
    ours, wanted = named(PRESETS, case.id, "preset"), _preset(case.words)
    for name, value in wanted._asdict().items():
        case.compared.add(name)
        if getattr(ours, name) != value:
            case.refuse(name, f"{getattr(ours, name)!r} instead of {value!r}")


def _preset(config: Mapping[str, Any]) -> Preset:
    weights, bounds = weights_of(config), bounds_of(config)
    level = weights["level"] if weights else "none"
    return Preset(
        weights=f"{level}-normalized" if bounds["normalize"] else level,
        weight_range=(bounds["lower"], bounds["upper"]),
        out_of_range=bounds["out_of_range"],
        reject={rule.name: (rule.lower, rule.upper) for rule in rules_of(config)},
        bypass=bool(config.get("bypass_mode", False)),
        loss=named(LOSS_TYPES, config.get("loss_type", "ppo_clip"), "loss_type"),
    )
