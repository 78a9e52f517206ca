"""The family of defects seen in the field: the right value, through the functions that decide it.

The last part of an id names its case; inputs that a case gives only in its description are written here.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from stream.validity import DropReason, Measured, TruncationReason, measure
from tests.conformance.cases import Case, cases_of, family, named, read
from tests.conformance.families_advantages import estimator_of
from tests.conformance.families_correction import check_correction
from tests.conformance.families_losses import check_policy_loss
from workers.rollout.engine_client import sampling as answer
from workers.train.algorithms.advantages import ESTIMATORS, estimate
from workers.train.algorithms.completion_layout import CompletionLayout
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.masks import DROP_REASONS, NONE, TRUNCATION_REASONS, CompletionFacts, Masks, derive_masks
from workers.train.algorithms.normalization import normalize, normalize_tokens
from workers.train.algorithms.shaping import clip_rewards

VENDORED: Final = Path(__file__).with_name("advantages.json")

Check = Callable[[Case], None]
CHECKS: Final[dict[str, Check]] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Register what runs the case of this name."""

    def enter(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return enter


@family("field_cases")
def field_cases(case: Case) -> None:
    """One defect."""
    name = next((part for part in case.id.split("/") if part in CHECKS), case.id)
    named(CHECKS, name, "field case")(case)


@check("trailing_tool_token")
def trailing_tool_token(case: Case) -> None:
    """The reward lands on the last token that counts, whichever stands behind it."""
    mask_RT = case.mask("mask")
    ids_R = torch.arange(len(mask_RT))
    sheets = CompletionLayout(ids_R, len(mask_RT), mask_RT, mask_RT)
    rewards_CT = sheets.on_last_token(case.floats("row_rewards"))
    inputs = {
        "token_rewards_CT": rewards_CT,
        "mask_CT": sheets.mask_CT,
        "values_CT": torch.zeros_like(rewards_CT),
        "bootstrap_C": torch.zeros(len(mask_RT)),
    }
    options = {"discount": case["gamma"], "gae_lambda": case["lam"], "whiten": False, "center": "tokens"}
    for name in ("gae", "reinforce_plus_plus"):
        case.expect("expected_returns", sheets.to_rows(ESTIMATORS[name](inputs, options).returns_CT))


@check("token_rejected_but_row_valid")
def token_rejected_but_row_valid(case: Case) -> None:
    """A token is rejected, and the row keeps its reward and its other tokens."""
    kept_RT = case.mask("mask")
    facts = _facts(case["row_rewards"], case.codes("group_ids"))
    masks = derive_masks(
        facts,
        torch.arange(len(kept_RT)),
        torch.ones_like(kept_RT),
        truncation={},
        rejected_by_rule={"the case's": ~kept_RT},
    )
    case.expect("expected", torch.where(masks.loss_tokens_RT, _advantages_C(case, facts, masks).unsqueeze(1), 0.0))


@check("all_outputs_of_trajectory_rejected")
@check("session_final_output_rejected")
def session_final_output_rejected(case: Case) -> None:
    """Rows of one completion are rejected; its reward counts once, for the rows that are left."""
    rejected_R = case.mask("row_rejected")
    ids_R = torch.tensor(case["row_to_trajectory"])
    facts = _facts(case["trajectory_rewards"], torch.zeros(len(case["trajectory_rewards"]), dtype=torch.int64))
    sampled_RT = torch.ones(len(ids_R), 1, dtype=torch.bool)
    masks = derive_masks(
        facts, ids_R, sampled_RT, truncation={}, rejected_by_rule={"the case's": rejected_R.unsqueeze(1)}
    )
    found_C = _advantages_C(case, facts, masks)
    case.expect("expected_row_advantage", torch.where(masks.loss_rows_R, found_C[ids_R], 0.0))


@check("denominator_counts_rejected_tokens")
def denominator_counts_rejected_tokens(case: Case) -> None:
    """The mean over tokens is not over rejected ones."""
    vendored = cases_of(read(VENDORED), "policy_losses")
    right = next(other for other in [*_policy_cases(case), *vendored] if other.id == "vanilla/token-mean")
    check_policy_loss(right.with_shared("policy_loss_inputs"))
    case.differences += right.differences
    wrong = torch.tensor(float(case["must_not_equal"]))
    case.compared.add("must_not_equal")
    if torch.isclose(torch.tensor(float(right["expected_loss"])), wrong, rtol=1e-6, atol=1e-6):
        case.refuse("must_not_equal", "the loss that is expected elsewhere is this wrong one")


@check("nan_gradient_trap")
def nan_gradient_trap(case: Case) -> None:
    """Junk in a row without a token changes neither loss nor gradient, whatever the loss."""
    for name, junk in itertools.product(("advantages", "old_log_prob", "is_weights"), (math.nan, math.inf, -math.inf)):
        for other in _policy_cases(case):
            if name != "is_weights" or other.get("is_weights") is not None:
                check_policy_loss(other, {name: _spoiled(other, name, junk)})
            for result in other.differences:
                case.refuse(f"{other.id}, {name} {junk}: {result.field}", result.reason)
    case.compared.add("policy_losses")


@check("is_batch_normalise_after_rejection")
def is_batch_normalise_after_rejection(case: Case) -> None:
    """The mean weight is that of survivors."""
    check_correction(case.with_shared("rollout_correction_inputs"))


@check("adv_norm_truncated_row")
def adv_norm_truncated_row(case: Case) -> None:
    """A truncated row that policy excludes is in no mean over tokens."""
    mask_RT = case.mask("loss_mask_rolled")
    rewards = case.get("rewards", [1.0] * len(mask_RT))
    truncated = [None if valid else TruncationReason.LENGTH for valid in case["valid"]]
    facts = _facts(rewards, torch.zeros(len(rewards), dtype=torch.int64), truncated=truncated)
    masks = derive_masks(facts, torch.arange(len(rewards)), mask_RT, truncation={TruncationReason.LENGTH: "exclude"})
    result = normalize_tokens(
        masks.rewards_C.unsqueeze(1).expand(mask_RT.shape),
        masks.loss_tokens_RT,
        facts.group_ids_C,
        mean="batch",
        std="none",
        leave_one_out=False,
        unbiased=True,
        epsilon=1e-5,
    )
    case.expect("expected_advantages", result)


@check("inf_reward_before_clip")
def inf_reward_before_clip(case: Case) -> None:
    """A reward that is no number is invalid before anything bounds it."""
    facts = _facts(case["rewards"], torch.arange(len(case["rewards"])))
    ids_R = torch.arange(len(case["rewards"]))
    masks = derive_masks(facts, ids_R, torch.ones(len(ids_R), 1, dtype=torch.bool), truncation={})
    case.expect("valid", masks.baseline_C)
    result = normalize(
        clip_rewards(masks.rewards_C, masks.baseline_C, limit=float(case.get("clip", 20.0))),
        Grouping(facts.group_ids_C, masks.baseline_C, facts.num_groups),
        mean="batch",
        std="none",
        leave_one_out=False,
        unbiased=True,
        epsilon=1e-5,
    )
    case.expect("expected", result)


@check("gpg_padding_rows")
def gpg_padding_rows(case: Case) -> None:
    """Rows of padding are not of the batch."""
    rewards = [*case.get("rewards", [1.0, 0.0, 1.0, 0.0]), *[0.0] * 4]
    dropped = [DropReason.NO_VALID_ROW if row >= len(rewards) - 4 else None for row in range(len(rewards))]
    facts = _facts(rewards, torch.zeros(len(rewards), dtype=torch.int64), dropped=dropped)
    ids_R = torch.arange(len(rewards))
    masks = derive_masks(facts, ids_R, torch.ones(len(ids_R), 1, dtype=torch.bool), truncation={})
    groups = Grouping(facts.group_ids_C, masks.baseline_C, facts.num_groups)
    inputs = {"rewards_C": masks.rewards_C, "groups": groups, "loss_lengths_C": masks.loss_C.long()}
    result = estimate("gpg", inputs, {"f_norm": 1.0}, single_sample_policy="zero")
    case.expect("expected_first4", result[:-4])


@check("eos_by_finish_reason")
def eos_by_finish_reason(case: Case) -> None:
    """What the engine says of the end decides, whatever the lengths."""
    for number, words in enumerate(case["cases"]):
        results = [answer.SampledTurn([], [], reason, []).is_truncated for reason in words["finish_reasons"]]
        case.expect(f"cases[{number}].expected_truncated", results, words["expected_truncated"])


def _facts(
    rewards: list[Any],
    group_ids_C: Tensor,
    *,
    truncated: list[TruncationReason | None] | None = None,
    dropped: list[DropReason | None] | None = None,
) -> CompletionFacts:
    """What producers would say of completions with these rewards."""
    results = [measure(float(reward)) for reward in rewards]
    none_C = torch.full_like(group_ids_C, NONE)
    return CompletionFacts(
        group_ids_C=group_ids_C,
        num_groups=int(group_ids_C.max()) + 1,
        rewards_C=torch.tensor([float(reward) for reward in rewards], dtype=torch.float64),
        measured_C=torch.tensor([isinstance(reward, Measured) for reward in results]),
        reward_reason_C=none_C,
        rollout_reason_C=none_C,
        truncation_reason_C=_codes(truncated, TRUNCATION_REASONS) if truncated else none_C,
        drop_reason_C=_codes(dropped, DROP_REASONS) if dropped else none_C,
        turns_C=torch.ones_like(group_ids_C),
    )


def _codes(reasons: list[Any], known: tuple[Any, ...]) -> Tensor:
    return torch.tensor([NONE if reason is None else known.index(reason) for reason in reasons])


def _advantages_C(case: Case, facts: CompletionFacts, masks: Masks) -> Tensor:
    """By the case's estimator, of what the masks let vote."""
    name, options = estimator_of(case["estimator"], case.get("params", {}))
    groups = Grouping(facts.group_ids_C, masks.baseline_C, facts.num_groups)
    inputs = {"rewards_C": masks.rewards_C, "groups": groups, "loss_lengths_C": masks.loss_C.long()}
    return estimate(name, inputs, options, single_sample_policy="zero")


def _policy_cases(case: Case) -> list[Case]:
    """The policy losses of the same file, unrun; of the vendored one where it has none."""
    file = case.file if case.file.get("policy_losses") else read(VENDORED)
    return [other.with_shared("policy_loss_inputs") for other in cases_of(file, "policy_losses")]


def _spoiled(case: Case, name: str, junk: float) -> Tensor:
    """The shared inputs with junk in the rows in which nothing bears loss."""
    idle_R = ~case.mask("mask").any(dim=1)
    return case.tensor(case.file["policy_loss_inputs"][name]).masked_fill(idle_R.unsqueeze(1), junk)
