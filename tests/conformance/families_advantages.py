"""Families of advantages: by completion, by token, whitened, and the metric pass@k."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from tests.conformance.cases import Case, NotMappedError, family, named
from workers.train.algorithms.advantages import ESTIMATORS, estimate
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.normalization import whiten
from workers.train.algorithms.pass_at_k import pass_at_k

ESTIMATOR_NAMES: Final = {
    "grpo_no_std": ("grpo", {"normalize_std": False}),
    "grpo_vectorized": ("grpo", {}),
    "grpo_passk_no_std": ("grpo_passk", {"normalize_std": False}),
    "rloo_vectorized": ("rloo", {}),
}
"""Our name and options for names of the file; other names are the same."""
OPTION_NAMES: Final = {
    "norm_by_std": "normalize_std",
    "norm_adv_by_std_in_grpo": "normalize_std",
    "eps": "epsilon",
    "gamma": "discount",
    "lam": "gae_lambda",
    "handle_zero_tail": "zero_tail",
}
UNSAID: Final = {
    "normalize_std": True,
    "leave_one_out": False,
    "f_norm": 1.0,
    "discount": 1.0,
    "gae_lambda": 1.0,
    "whiten": True,
    "center": "tokens",
    "zero_tail": True,
    "k": 1,
}
"""Defaults of options that a case leaves out: those of the project that made the file."""


@family("group_advantages")
def group_advantages(case: Case) -> None:
    """One advantage to a row, which is a completion here."""
    case.expect("expected", advantages_C(case, case["estimator"], case.get("params", {})))


@family("gdpo")
def gdpo(case: Case) -> None:
    """The same from several reward parts."""
    parts = case["reward_components"]
    weights = case.get("weights", [1.0] * len(parts))
    extra = {
        "parts_PC": torch.stack([case.tensor(values) for values in parts.values()]),
        "has_part_PC": torch.ones(len(parts), len(case["group_ids"]), dtype=torch.bool),
        "part_weights_P": case.tensor(list(weights.values()) if isinstance(weights, dict) else weights),
    }
    case.expect("expected", advantages_C(case, case["estimator"], case.get("params", {}), **extra))


def advantages_C(case: Case, estimator: str, params: Mapping[str, Any], **extra: Tensor) -> Tensor:
    """Estimate by the file's name of an estimator; `singleton` defaults to the project's value."""
    name, options = estimator_of(estimator, params)
    valid_C = case.mask("valid", [True] * len(case["group_ids"]))
    if named(ESTIMATORS, name, "estimator").traits.level != "completion":
        raise NotMappedError(f"{estimator!r} estimates by token, the case is one of rows")
    inputs = {
        "groups": Grouping(case.codes("group_ids"), valid_C),
        "lengths_C": torch.where(valid_C, case.floats("lengths", [1] * len(valid_C)).long(), 0),
        "loss_lengths_C": torch.where(valid_C, case.floats("lengths", [1] * len(valid_C)).long(), 0),
        **extra,
    }
    if "rewards" in case.words:
        inputs["rewards_C"] = case.floats("rewards")
        inputs["correct_C"] = inputs["rewards_C"] >= params.get("correct_at", 1.0)
    return estimate(name, inputs, options, single_sample_policy="zero")


@family("token_advantages")
def token_advantages(case: Case) -> None:
    """An advantage and a return to each token; the rows are completions, whole in one line each."""
    name, options = estimator_of(case["estimator"], case.get("params", {}), epsilon=1e-8)
    estimator = named(ESTIMATORS, name, "estimator")
    if estimator.traits.level != "token":
        raise NotMappedError(f"{name!r} estimates by row, the case is one of tokens")
    mask_CT = case.mask("mask")
    valid_C = case.mask("valid", [True] * len(mask_CT))
    zeros_CT = [[0.0] * mask_CT.shape[1]] * mask_CT.shape[0]
    ones_CT = [[1.0] * mask_CT.shape[1]] * mask_CT.shape[0]
    zeros_C = [0.0] * mask_CT.shape[0]
    inputs = {
        "groups": Grouping(case.codes("group_ids"), valid_C),
        "mask_CT": mask_CT & valid_C.unsqueeze(1),
        "token_rewards_CT": case.floats("token_rewards"),
        "values_CT": case.floats("values", zeros_CT),
        "bootstrap_C": case.floats("bootstrap", zeros_C),
        "greedy_C": case.floats("reward_baselines", zeros_C),
        "old_logprobs_CT": case.floats("old_log_probs", zeros_CT),
        "sum_pi_squared_CT": case.floats("sum_pi_squared", zeros_CT),
        "weights_CT": case.floats("rollout_is_weights", ones_CT),
    }
    result = estimator(inputs, options)
    case.expect("expected_advantages_masked", result.advantages_CT)
    case.expect("expected_returns_masked", result.returns_CT)


@family("whitening")
def whitening(case: Case) -> None:
    """Values over a mask; mean and variance as of the same values in one group."""
    values, mask = case.floats("values"), case.mask("mask")
    shift = bool(case.get("shift", "shift_False" not in case.id))
    case.expect("expected_masked", whiten(values, mask, shift=shift))
    everything = Grouping(torch.zeros(values.numel(), dtype=torch.int64), mask.flatten())
    if "mean" in case.words:
        case.expect("mean", everything.mean(values.flatten()).squeeze(0))
    if "var_unbiased" in case.words:
        case.expect("var_unbiased", everything.std(everything.centred(values.flatten())).square().squeeze(0))


@family("pass_at_k")
def pass_at_k_known(case: Case) -> None:
    """Of n completions c are right: the chance that one of k is; nothing where there are not k."""
    result = pass_at_k(*(torch.tensor([case[name]]) for name in ("n_valid", "n_correct")), case["k"])
    if case["expected"] is None:
        case.expect("expected", result.known.squeeze(0), 0)
    else:
        case.expect("expected", result.value.squeeze(0) if result.known.all() else None)


def estimator_of(estimator: str, params: Mapping[str, Any], *, epsilon: float = 1e-6) -> tuple[str, dict[str, Any]]:
    """Our name and options for the file's estimator and parameters; words of explanation among these choose nothing."""
    name, implied = ESTIMATOR_NAMES.get(estimator, (estimator, {}))
    options = {OPTION_NAMES.get(key, key): value for key, value in params.items() if not isinstance(value, str)}
    return name, {**UNSAID, "epsilon": epsilon, **options, **implied}
