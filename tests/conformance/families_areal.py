"""Families of AReaL: its losses, normalisation, m2po, interpolated proximal policy, GAE, overlong penalty."""

from typing import Any, Final

import torch
from torch import Tensor

from tests.conformance.cases import Case, NotMappedError, family, named
from tests.conformance.policies import loss_of
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.correction import RejectionRule, importance_weights, reject
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.losses import LossInputs, token_loss
from workers.train.algorithms.normalization import normalize, normalize_tokens
from workers.train.algorithms.proximal import interpolate_logprobs
from workers.train.algorithms.sequences import Sequences, log_ratios
from workers.train.algorithms.shaping import shape_overlong

LOSS_NAMES: Final = {"ppo": "clipped", "grpo": "clipped", "gspo": "clipped", "sapo": "sapo", "cispo": "cispo"}
STAT_NAMES: Final = {"clip_mask": "clip_fraction", "dual_clip_mask": "clip_fraction_lower"}


@family("areal_losses")
def areal_losses(case: Case) -> None:
    """Loss, gradient and what was clipped, over the file's one batch; the mean over tokens."""
    case = case.with_shared("areal_loss_inputs")
    kind = case.get("loss", case.id.partition("/")[0])
    name = named(LOSS_NAMES, kind, "loss")
    level = case.get("level", "sequence" if kind == "gspo" else "token")
    if name not in {"clipped", "sapo"} and level != "token":
        raise NotMappedError(f"{kind!r} has no ratio of level {level!r}")
    # AReaL's sapo has no proximal policy: its ratio is taken against the policy that sampled.
    against = "behave_logp" if name == "sapo" else "prox_logp"
    kept_RT, weights_RT = _behaviour_correction(case)
    logprobs_RT = case.floats("logp").requires_grad_()
    inputs = {
        "proximal_RT": case.floats(against),
        "advantages_RT": case.floats("advantages"),
        "mask_RT": kept_RT,
        "weights_RT": weights_RT,
    }
    options = {
        "clip_low": case.get("eps_clip", 0.2),
        "clip_high": case.get("eps_clip_higher", case.get("eps_clip", 0.2)),
        "dual_clip": case.get("c_clip", 0.0),
        "level": level,
        "tau_positive": case.get("tau_pos", 1.0),
        "tau_negative": case.get("tau_neg", 1.05),
    }
    output = loss_of(
        name,
        logprobs_RT,
        aggregation="token-mean",
        info=None,
        forced=False,
        options=options,
        **inputs,
    )
    output.loss.backward()
    case.expect("expected_loss", output.loss)
    case.expect("expected_grad", logprobs_RT.grad)
    sequences = Sequences(inputs.pop("mask_RT"), torch.arange(len(kept_RT)))
    loss_inputs = LossInputs(logprobs_RT=logprobs_RT.detach(), sequences=sequences, **inputs)
    marks = token_loss(name, loss_inputs, options).token_metrics
    none_RT = torch.zeros_like(kept_RT)

    def stat(name: str) -> Tensor:
        return torch.where(kept_RT, marks.get(named(STAT_NAMES, name, "statistic"), none_RT).double(), 0.0)

    case.expect_numbers("expected_stat", stat)


def _behaviour_correction(case: Case) -> tuple[Tensor, Tensor | None]:
    """AReaL's `rejection_sampling`, or the cap that it replaced: weights proximal / behaviour, clamped or rejected."""
    mask_RT = case.mask("mask") & case.mask("valid", [True] * len(case["mask"])).unsqueeze(1)
    cap = case.get("behave_imp_weight_cap", case.get("behav_imp_weight_cap"))
    rejection: dict[str, Any] = case.get("rejection_sampling", {} if cap is None else {"upper": cap})
    if not rejection:
        return mask_RT, None
    options = {"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0, **rejection}
    if options["metric"] != "ratio" or options["level"] != "token":
        raise NotMappedError(f"no weights of level {options['level']!r} bounded by {options['metric']!r}")
    pair = (case.floats("prox_logp"), case.floats("behave_logp"))
    ids_R = torch.arange(len(mask_RT))
    lower, upper = options.get("lower") or 0.0, options["upper"]
    kept_RT = mask_RT
    if options["action"] == "mask":
        # The rule is written in the inverse ratio.
        rule = RejectionRule("token_k1", 1 / upper, 1 / lower if lower else float("inf"))
        kept_RT, lower, upper = reject([rule], log_ratios(*pair, Sequences(mask_RT, ids_R))).kept_RT, 0.0, float("inf")
    weights = importance_weights(
        log_ratios(*pair, Sequences(kept_RT, ids_R)),
        level="token",
        lower=lower,
        upper=upper,
        out_of_range="truncate",
        normalize=False,
    )
    return kept_RT, weights.weights_RT


@family("areal_normalization")
def areal_normalization(case: Case) -> None:
    """Rows, or tokens where the case has a mask of them."""
    options = {
        "mean": case.get("mean_level", "none"),
        "std": case.get("std_level", "none"),
        "leave_one_out": bool(case.get("mean_leave1out", False)),
        "unbiased": bool(case.get("std_unbiased", True)),
        "epsilon": float(case.get("eps", 1e-5)),
    }
    values = case.floats("x")
    valid_R = case.mask("valid", [True] * len(values))
    group_ids_R = _group_ids(case, len(values))
    if values.ndim == 2:
        mask_RT = case.mask("mask") & valid_R.unsqueeze(1)
        case.expect("expected", normalize_tokens(values, mask_RT, group_ids_R, **options))
    else:
        case.expect("expected", normalize(values, Grouping(group_ids_R, valid_R), **options))


def _group_ids(case: Case, rows: int) -> Tensor:
    """Ids from the sizes of groups that stand one after the other, or as the case gives them."""
    if case.get("group_ids"):
        return case.codes("group_ids")
    sizes = torch.tensor(case.get("group_sizes", [rows]))
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)


@family("areal_m2po")
def areal_m2po(case: Case) -> None:
    """Which tokens the bound on the second moment keeps, over the inputs of the losses."""
    case = case.with_shared("areal_loss_inputs")
    mask_RT, rule = case.mask("mask"), RejectionRule("m2po", 0.0, float(case["m2_threshold"]))
    pair = (case.floats("prox_logp"), case.floats("behave_logp"))
    case.expect_mask(
        "expected_mask", reject([rule], log_ratios(*pair, Sequences(mask_RT, torch.arange(len(mask_RT))))).kept_RT
    )


@family("areal_prox_approx")
def areal_prox_approx(case: Case) -> None:
    """Proximal log-probs between the engine's and the trainer's, by each method that the case has a result of."""
    versions_RT = torch.tensor(case["versions"])
    for method in sorted(set(case.words) - {"id", "versions", "current_version", "old_logp", "logp", "dtype"}):
        result = interpolate_logprobs(
            case.floats("old_logp"),
            case.floats("logp"),
            versions_RT,
            torch.ones_like(versions_RT, dtype=torch.bool),
            case["current_version"],
            method=method,
        )
        case.expect(method, result)


@family("areal_gae")
def areal_gae(case: Case) -> None:
    """Advantages and returns of the tokens in the mask; AReaL also carries them over the others, unused."""
    mask_CT = case.mask("loss_mask")
    values_CT = case.floats("values")
    result = ESTIMATORS["gae"](
        {
            "token_rewards_CT": case.floats("rewards"),
            "mask_CT": mask_CT,
            "values_CT": values_CT,
            "bootstrap_C": torch.where(case.mask("truncated"), values_CT[:, -1], 0.0),
        },
        {"discount": case["discount"], "gae_lambda": case["gae_lambda"], "whiten": False, "center": "tokens"},
    )
    case.expect("expected_advantages", result.advantages_CT, within=mask_CT)
    case.expect("expected_returns", result.returns_CT, within=mask_CT)


@family("areal_overlong")
def areal_overlong(case: Case) -> None:
    """A reward less the penalty for length; AReaL has no other for one that was cut short."""
    result = shape_overlong(
        case.tensor([case["reward"]]),
        torch.tensor([True]),
        torch.tensor([case["response_len"]]),
        torch.tensor([False]),
        max_length=case["max_response_len"],
        tail=case["overlong_tokens"],
        factor=case["factor"],
    )
    case.expect("expected", result.squeeze(0))
