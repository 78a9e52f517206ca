"""What a step reports: a flat mapping from name to number.

Nothing invalid is in any of them but the counters, and a mean of nothing is left out, never 0. `NAMES` is the list of
all that there is, with what each is measured over; names that end in `*` stand for one counter to a state or reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from stream.validity import DropReason
from workers.settings import Settings
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.masks import (
    DROP_REASONS,
    NONE,
    REWARD_REASONS,
    ROLLOUT_REASONS,
    TRUNCATION_REASONS,
    CompletionFacts,
    Masks,
)
from workers.train.algorithms.pass_at_k import pass_at_k
from workers.train.step.batch import Batch

Metrics = dict[str, float | int]

STEP_METRICS: Final[dict[str, str]] = {
    "step": "optimizer batches done, this one included",
    "version": "policy version that was trained",
    "learning_rate": "of this step",
    "trained": "1 if the optimizer moved, 0 if the step was skipped",
    "seconds": "wall time of the step",
    "loss": "mean over loss tokens, and over the updates of the batch",
    "grad_norm": "before clipping; mean over updates",
    "reward/mean": "completions in B, after the truncation policy",
    "reward/std": "the same, sample standard deviation; two or more",
    "reward/min": "the same",
    "reward/max": "the same",
    "reward/count": "the number of completions in B that the four above divide by",
    "reward/part/*": "one part of the reward, `NAME/mean`, `/std`, `/min`, `/max`: completions in B",
    "sampled/reward_mean": "completions in B of trained and of filtered groups: what the policy earns",
    "sampled/reward_count": "what that divides by",
    "pass@*": "trained and filtered groups with K completions; `pass@K/valid`: of those in B; `pass@K/all`: of all, "
    "the invalid ones counted as wrong",
    "advantage/mean": "completions in L",
    "advantage/std": "completions in L, sample standard deviation; two or more",
    "advantage/min": "completions in L",
    "advantage/max": "completions in L",
    "valid_fraction": "completions in B by completions",
    "rows/*": "completions by state: valid, dropped:R, failed:R, reward:R, truncated:R (excluded), rejected:RULE",
    "truncated/*": "completions cut short, by reason, whatever became of them",
    "truncated/reward_mean": "completions in B that were cut short",
    "truncated/length_mean": "sampled tokens of completions in B that were cut short",
    "groups/kept": "groups of the batch",
    "groups/tie": "of those, groups with two or more completions in B, all of the same reward",
    "groups/singleton": "of those, groups with one completion in B",
    "groups/dropped/*": "groups dropped since the step before, by reason",
    "length/mean": "sampled tokens of a completion, over B",
    "length/max": "the same",
    "length/by_end/*": "the mean of the same, by how the completion ended: `finished` or why it was cut short",
    "turns/mean": "turns of a completion, over B",
    "tokens/loss": "tokens that bear loss: what every mean over loss tokens divides by",
    "tokens/sampled": "tokens that the policy sampled, valid or not",
    "tokens/too_old": "of those, tokens over the maximal age",
    "tokens/not_finite": "of those, tokens whose engine log-prob is no number",
    "staleness/mean": "versions between sampling and training, over loss tokens",
    "staleness/max": "the same",
    "clip_fraction": "loss tokens where the bounded term was taken, over all updates",
    "clip_fraction_lower": "loss tokens where the bound for negative advantages was, over all updates",
    "ratio/mean": "policy now by proximal policy, loss tokens, over all updates",
    "ratio/max": "the same",
    "kl/k1": "estimate of KL(proximal, policy now) from log-ratios, loss tokens, over all updates",
    "kl/k3": "the same by exp(d) - 1 - d, which is never negative",
    "kl/abs": "mean absolute log-ratio of the same, where the loss penalises it",
    "correction/*": "how far trainer and engine were apart when the batch was formed, over loss tokens and the "
    "completions that have them: weights, effective sample size, perplexities, KL (see `algorithms.diagnostics`)",
    "reference/kl": "divergence from the policy of the beginning, loss tokens, over all updates",
    "value/*": "of the critic, loss tokens, over all updates",
    "entropy": "nats, of the distributions that loss tokens were drawn from, under the proximal policy",
}

COLLECTION_METRICS: Final[dict[str, str]] = {
    "attempt/seconds": "from claim to rolled out, of the batch's groups",
    "attempt/seconds_first": "the same of the first attempts at those prompts; one cancelled for its age counts with "
    "the time that it had run, so it is at least that. Above `attempt/seconds`, what is trained is too short",
    "attempt/cancelled": "attempts at the batch's prompts that were cancelled for their age",
    "stragglers/seconds": "of the step: the wait for groups under way too long, with a full batch in hand",
    "stragglers/abandoned": "groups for which it waited in vain, `pacing.straggler_timeout_s`",
}
"""Beside those: how the batch came together, told by the trainer."""


def step_metrics(
    batch: Batch,
    masks: Masks,
    advantages_C: Tensor,
    *,
    settings: Settings,
    version: int,
    too_old: int = 0,
    filtered: tuple[Batch, Masks] | None = None,
    dropped: Mapping[DropReason, int] | None = None,
) -> Metrics:
    """Everything that is known of a batch without its model; the learner adds what the loss knows.

    Args:
        batch: the groups that are trained.
        masks: theirs.
        advantages_C: theirs.
        settings: of the run.
        version: the policy version that is trained.
        too_old: tokens over the maximal age.
        filtered: groups that the group filter dropped, whose rewards were measured all the same.
        dropped: numbers of groups dropped, by reason.
    """
    facts = batch.facts
    truncated_C = masks.baseline_C & (facts.truncation_reason_C != NONE)
    lengths_C = _sampled_lengths(batch)
    rewards = masks.rewards_C[masks.baseline_C]
    filtered_rewards = [filtered[1].rewards_C[filtered[1].baseline_C]] if filtered else []
    sampled_rewards = torch.cat([rewards, *filtered_rewards])
    found: Metrics = {
        **_summary("reward", rewards),
        "reward/count": len(rewards),
        **_parts(batch, masks),
        **_pass_at_k([(batch, masks), *([filtered] if filtered else [])], settings.algorithm.success_threshold),
        **_mean("sampled/reward_mean", sampled_rewards),
        "sampled/reward_count": len(sampled_rewards),
        **_summary("advantage", advantages_C[masks.loss_C]),
        **_mean("truncated/reward_mean", masks.rewards_C[truncated_C]),
        **_mean("truncated/length_mean", lengths_C[truncated_C]),
        **_mean("length/mean", lengths_C[masks.baseline_C]),
        **_max("length/max", lengths_C[masks.baseline_C]),
        **_lengths_by_end(facts, masks, lengths_C),
        **_mean("turns/mean", facts.turns_C[masks.baseline_C]),
        **_mean("valid_fraction", masks.baseline_C),
        **_group_counts(facts, masks, dropped or {}),
        "tokens/loss": int(masks.loss_tokens_RT.sum()),
        "tokens/sampled": int(batch.sampled_RT.sum()),
        "tokens/too_old": too_old,
        "tokens/not_finite": int((batch.sampled_RT & ~torch.isfinite(batch.rollout_logprobs_RT)).sum()),
    }
    staleness_N = version - batch.versions_RT[masks.loss_tokens_RT]
    found |= _mean("staleness/mean", staleness_N) | _max("staleness/max", staleness_N)
    found |= {f"rows/{state}": count for state, count in sorted(count_states(facts, masks).items())}
    for code in facts.truncation_reason_C[facts.truncation_reason_C != NONE].tolist():
        name = f"truncated/{TRUNCATION_REASONS[code]}"
        found[name] = found.get(name, 0) + 1
    return found


def count_states(facts: CompletionFacts, masks: Masks) -> Counter[str]:
    """Completions by what became of them; each counts once, under the first of its facts in the order below."""
    columns = zip(
        facts.drop_reason_C.tolist(),
        facts.rollout_reason_C.tolist(),
        facts.reward_reason_C.tolist(),
        facts.truncation_reason_C.tolist(),
        masks.rejected_by_C.tolist(),
        masks.baseline_C.tolist(),
        strict=True,
    )
    return Counter(_state(*column, rules=masks.rules) for column in columns)


def _state(
    dropped: int, failed: int, unmeasured: int, truncated: int, rejected: int, valid: bool, *, rules: Sequence[str]
) -> str:
    if valid:
        return "valid"
    if dropped != NONE:
        return f"dropped:{DROP_REASONS[dropped]}"
    if failed != NONE:
        return f"failed:{ROLLOUT_REASONS[failed]}"
    if unmeasured != NONE:
        return f"reward:{REWARD_REASONS[unmeasured]}"
    if rejected != NONE:
        return f"rejected:{rules[rejected]}"
    return f"truncated:{TRUNCATION_REASONS[truncated]}"


def _group_counts(facts: CompletionFacts, masks: Masks, dropped: Mapping[DropReason, int]) -> Metrics:
    groups = Grouping(facts.group_ids_C, masks.baseline_C, facts.num_groups)
    tied_G = groups.tied(masks.rewards_C) & (groups.count_G > 1)
    return {
        "groups/kept": facts.num_groups,
        "groups/tie": int(tied_G.sum()),
        "groups/singleton": int((groups.count_G == 1).sum()),
        **{f"groups/dropped/{reason}": count for reason, count in sorted(dropped.items())},
    }


def _parts(batch: Batch, masks: Masks) -> Metrics:
    found: Metrics = {}
    for name, values_C in zip(batch.part_names, batch.parts_PC, strict=True):
        found |= _summary(f"reward/part/{name}", values_C[masks.baseline_C])
    return found


def _pass_at_k(sampled: Sequence[tuple[Batch, Masks]], correct_at: float) -> Metrics:
    """Over groups as they were sampled, so filtered ones too: those all right or all wrong are the most of those."""
    valid, every, right = [], [], []
    for batch, masks in sampled:
        facts = batch.facts
        groups = Grouping(facts.group_ids_C, masks.baseline_C, facts.num_groups)
        valid.append(groups.count_G.long().cpu())
        every.append(torch.bincount(facts.group_ids_C, minlength=facts.num_groups).cpu())
        right.append(groups.sum((masks.rewards_C >= correct_at).double()).long().cpu())
    valid_G, every_G, right_G = torch.cat(valid), torch.cat(every), torch.cat(right)
    found: Metrics = {}
    k = 1
    while k <= (int(every_G.max()) if len(every_G) else 0):
        for name, n_G in (("valid", valid_G), ("all", every_G)):
            passed = pass_at_k(n_G, right_G, k)
            found |= _mean(f"pass@{k}/{name}", passed.value[passed.known])
        k *= 2
    return found


def _lengths_by_end(facts: CompletionFacts, masks: Masks, lengths_C: Tensor) -> Metrics:
    found: Metrics = {}
    for code, end in enumerate(("finished", *TRUNCATION_REASONS), start=NONE):
        found |= _mean(f"length/by_end/{end}", lengths_C[masks.baseline_C & (facts.truncation_reason_C == code)])
    return found


def _sampled_lengths(batch: Batch) -> Tensor:
    """Sampled tokens of each completion: every one is in exactly one row."""
    zeros_C = torch.zeros_like(batch.facts.group_ids_C)
    return zeros_C.index_add(0, batch.completion_ids_R, batch.sampled_RT.sum(dim=1))


def _summary(name: str, values: Tensor) -> Metrics:
    found = _mean(f"{name}/mean", values)
    if len(values) > 1:
        found[f"{name}/std"] = float(values.std())
    if len(values):
        found |= {f"{name}/min": float(values.min()), f"{name}/max": float(values.max())}
    return found


def _mean(name: str, values: Tensor) -> Metrics:
    return {name: float(values.double().mean())} if len(values) else {}


def _max(name: str, values: Tensor) -> Metrics:
    return {name: values.max().item()} if len(values) else {}
