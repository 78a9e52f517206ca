"""Metrics of a step: a flat mapping from name to number.

Only counters include invalid data, and a mean over nothing is omitted, never 0. So are figures that cannot move under
the run's settings (`omit_constants`). `STEP_METRICS` lists every name with what it is measured over; a name that ends
in `*` stands for one counter per state or reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from stream.records import TrainedCompletion
from stream.validity import DropReason
from workers.settings import Settings
from workers.train.algorithms.correction_metrics import correction_metrics
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.masks import NONE, TRUNCATION_REASONS, CompletionFacts, Masks, too_old_tokens
from workers.train.algorithms.pass_at_k import pass_at_k
from workers.train.step.batch import Batch
from workers.train.step.branches import BRANCH_METRICS, branch_metrics
from workers.train.step.group_checks import GroupRewards, count_states
from workers.train.step.prepared_batch import CompleteComparison, PreparedBatch, compare_policies
from workers.train.step.reward_parts import merge_tables

Metrics = dict[str, float | int]

STEP_METRICS: Final[dict[str, str]] = {
    "step": "optimizer batches so far, including this one",
    "version": "policy version in training",
    "learning_rate": "of this step",
    "trained": "1 if the optimizer moved, 0 if the step was skipped",
    "seconds": "wall time of the step",
    "loss": "mean over loss tokens, and over the updates of the batch",
    "grad_norm": "before clipping; mean over updates",
    "reward/mean": "what the policy earns: completions in B of trained and of filtered groups, after the truncation "
    "policy",
    "reward/std": "the same completions, sample standard deviation; two or more",
    "reward/min": "the same completions",
    "reward/max": "the same completions",
    "reward/count": "number of completions that the four above are over",
    "reward/part/*": "one part of the reward, `NAME/mean`, `/std`, `/min`, `/max`, over the completions that "
    "have this part",
    "trained/reward_mean": "completions in B of trained groups: without the groups whose completions all earned the "
    "same, if these are filtered",
    "trained/reward_count": "number of completions that the mean is over",
    "pass@*": "trained and filtered groups with K completions; `pass@K/valid`: of those in B; `pass@K/all`: of all, "
    "with invalid ones counted as wrong",
    "advantage/mean": "completions in L",
    "advantage/std": "completions in L, sample standard deviation; two or more",
    "advantage/min": "completions in L",
    "advantage/max": "completions in L",
    "valid_fraction": "`rows/valid` divided by all of `rows/*`",
    "rows/*": "completions by state: valid, dropped:R (by the step), failed:R, reward:R, truncated:R (excluded), "
    "rejected:RULE. Groups that were dropped since the previous step count too, with what was wrong with each "
    "completion alone",
    "truncated/*": "truncated completions of the same groups by reason, valid or not",
    "truncated/reward_mean": "truncated completions in B",
    "truncated/length_mean": "sampled tokens of truncated completions in B",
    "groups/kept": "groups of the batch",
    "groups/tie": "of those, groups with two or more completions in B, all of the same reward",
    "groups/singleton": "of those, groups with one completion in B",
    "groups/dropped/*": "groups dropped since the previous step, by reason",
    "length/mean": "sampled tokens per completion in B",
    "length/max": "sampled tokens per completion in B",
    "length/by_end/*": "mean of sampled tokens per completion in B, by how it ended: `finished` or why it was "
    "truncated",
    "turns/mean": "turns per completion in B",
    "tokens/loss": "tokens that bear loss: the divisor of every mean over loss tokens",
    "tokens/sampled": "tokens that the policy sampled, valid or not",
    "tokens/too_old": "of those, tokens over the maximal age",
    "tokens/not_finite": "of those, tokens whose rollout log-prob is not finite",
    "tokens/forwarded": "tokens of one pass over the rows with loss, padding left out; a token that rows share in a "
    "micro-batch counts once",
    "tokens/shared": "tokens of the same rows that the pass did not repeat; both together are all tokens of these rows",
    **BRANCH_METRICS,
    "staleness/mean": "versions between sampling and training, over loss tokens",
    "staleness/max": "versions between sampling and training, over loss tokens",
    "correction/*": "how far off-policy the batch was: distance between trainer and engine when it was prepared, over "
    "loss tokens and the completions that have them: weights, effective sample size, perplexities, KL (see "
    "`algorithms.correction_metrics`)",
    "clip_fraction": "loss tokens where the bounded term applies, over all updates",
    "clip_fraction_lower": "loss tokens where the bound for negative advantages applies, over all updates",
    "ratio/mean": "policy in training by proximal policy, loss tokens, over all updates",
    "ratio/max": "policy in training by proximal policy, loss tokens, over all updates",
    "kl/k1": "estimate of KL(proximal, in training) from log-ratios, loss tokens, over all updates",
    "kl/k3": "the same divergence by exp(d) - 1 - d, which is never negative",
    "kl/abs": "mean absolute log-ratio of the same policies, for losses that penalise it",
    "reference/kl": "divergence from the reference policy, loss tokens, over all updates",
    "value/*": "of the critic, loss tokens, over all updates",
    "entropy": "nats, of the distributions that loss tokens were drawn from, under the old policy",
}

_FROM_RATIOS: Final = ("ratio/", "kl/", "clip_fraction")

COLLECTION_METRICS: Final[dict[str, str]] = {
    "attempt/seconds": "from claim to end of rollout, mean over the batch's groups",
    "attempt/seconds_first": "the same for the first attempt at each prompt; a cancelled attempt counts with the time "
    "that it ran, a lower bound. Above `attempt/seconds`, training favours short completions",
    "attempt/cancelled": "attempts at the batch's prompts that were cancelled for their age",
    "tools/calls": "tool calls in the batch's groups",
    "tools/errors": "of those, calls that ended with an error",
    "stragglers/seconds": "time that a full batch waited for stragglers",
    "stragglers/abandoned": "stragglers abandoned after half of `abort.stall_timeout_s`",
}
"""Metrics of how the batch was collected; the trainer adds them."""

TRAINER_METRICS: Final[dict[str, str]] = {
    "time": "when the step ended",
    "step_seconds": "from the end of the step before: collecting groups, training, recording, and waiting for the "
    "publication before it",
    "waiting_seconds": "of these, the time without enough scored groups for a step, in which the trainer did nothing",
    "tokens_per_second": "`tokens/sampled` divided by `step_seconds`",
    "publish/time": "when the last policy version before the step was announced",
    "publish/seconds": "that publication: copy and write the weights, push them to the engines, announce the version. "
    "It goes on beside the next step",
    "publish/waiting_seconds": "time that the trained step waited for that publication to end",
}
"""Metrics of the trainer's loop, which adds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Result of training on one batch."""

    trained: bool
    """True if the optimizer moved at least once."""
    skipped: str
    """Why it did not move, or stopped early: `no_valid_row`, `gradient_not_finite`; otherwise empty."""
    dropped: dict[str, DropReason]
    """Groups that rollout correction left with too little to train on, by prompt id."""
    loss: float
    """Mean over updates; 0.0 if nothing was valid; may be NaN if the step was skipped."""
    metrics: Metrics
    """By the names in `STEP_METRICS`."""
    without_loss: dict[str, Counter[str]] = field(default_factory=dict)
    """Completions of the batch that bore no loss, by prompt id and reason."""
    completions: dict[str, list[TrainedCompletion]] = field(default_factory=dict)
    """What the step did with each completion of the batch, by prompt id; greedy ones are not in it."""


@dataclass(slots=True, eq=False)
class StepAccumulator:
    """Sums and maxima over the micro-batches and updates of one step."""

    updates: int = 0
    """Updates that were computed, finite or not."""
    sums: dict[str, float] = field(default_factory=dict)
    """`loss` and `grad_norm` over updates, all others over loss tokens and updates."""
    maxima: dict[str, float] = field(default_factory=dict)
    forwarded: int = 0
    """Tokens of one pass over the rows with loss."""
    shared: int = 0
    """Tokens of these rows that the pass did not repeat, because another row begins with the same ones."""

    def add(self, sums: Mapping[str, Tensor | float], maxima: Mapping[str, Tensor | float]) -> None:
        """Add the sums and maxima of a part."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in maxima.items():
            self.maxima[name] = max(float(value), self.maxima.get(name, float("-inf")))

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return means, given the number of loss tokens; entropy is over the first update only."""
        divisors = {"loss": self.updates, "grad_norm": self.updates, "entropy": tokens}
        means = {name: value / divisors.get(name, tokens * self.updates) for name, value in self.sums.items()}
        shared = {"tokens/forwarded": self.forwarded, "tokens/shared": self.shared}
        return {"loss": 0.0, **means, **self.maxima, **shared}


def step_metrics(
    batch: Batch,
    masks: Masks,
    advantages_C: Tensor,
    *,
    settings: Settings,
    version: int,
    filtered: Sequence[GroupRewards] = (),
    dropped: Mapping[DropReason, int] | None = None,
) -> Metrics:
    """Return all metrics of a batch that need no pass of the model.

    Args:
        batch: the groups in training.
        masks: of the batch.
        advantages_C: of the batch.
        settings: of the run.
        version: the policy version in training.
        filtered: rewards of groups that the filters dropped, which count in `reward/*` and `pass@*`.
        dropped: number of dropped groups by reason.
    """
    facts = batch.facts
    truncated_C = masks.baseline_C & (facts.truncation_reason_C != NONE)
    lengths_C = _sampled_lengths(batch)
    trained = masks.rewards_C[masks.baseline_C]
    sampled = torch.cat([trained.cpu(), *(group.rewards_C[group.baseline_C] for group in filtered)])
    too_old_RT = too_old_tokens(batch.sampled_RT, batch.versions_RT, version, settings.pacing.max_token_age)
    metrics: Metrics = {
        **_summary("reward", sampled),
        "reward/count": len(sampled),
        **_part_metrics(batch, masks, filtered),
        **_mean("trained/reward_mean", trained),
        "trained/reward_count": len(trained),
        **_pass_at_k(facts, masks, filtered, settings.algorithm.success_threshold),
        **_summary("advantage", advantages_C[masks.loss_C]),
        **_mean("truncated/reward_mean", masks.rewards_C[truncated_C]),
        **_mean("truncated/length_mean", lengths_C[truncated_C]),
        **_mean("length/mean", lengths_C[masks.baseline_C]),
        **_max("length/max", lengths_C[masks.baseline_C]),
        **_lengths_by_end(facts, masks, lengths_C),
        **_mean("turns/mean", facts.turns_C[masks.baseline_C]),
        **_mean("valid_fraction", masks.used_C),
        **_group_counts(facts, masks, dropped or {}),
        "tokens/loss": int(masks.loss_tokens_RT.sum()),
        "tokens/sampled": int(batch.sampled_RT.sum()),
        "tokens/too_old": int(too_old_RT.sum()),
        "tokens/not_finite": int((batch.sampled_RT & ~torch.isfinite(batch.rollout_logprobs_RT)).sum()),
    }
    sampled_R = batch.sampled_RT.sum(dim=1)
    metrics |= branch_metrics(batch.branches, batch.completion_ids_R, sampled_R, masks.baseline_C)
    staleness_N = version - batch.versions_RT[masks.loss_tokens_RT]
    metrics |= _mean("staleness/mean", staleness_N) | _max("staleness/max", staleness_N)
    metrics |= {f"rows/{state}": count for state, count in sorted(count_states(facts, masks).items())}
    for code in facts.truncation_reason_C[facts.truncation_reason_C != NONE].tolist():
        name = f"truncated/{TRUNCATION_REASONS[code]}"
        metrics[name] = metrics.get(name, 0) + 1
    return metrics


def correction_step_metrics(prepared: PreparedBatch, settings: Settings) -> dict[str, float]:
    """Return the distance between trainer and engine when the batch was prepared, what was rejected, and the weights.

    Call it after the first update, when every micro-batch's old log-probs have been recorded.
    """
    policies, sequences = prepared.policies, prepared.sequences
    if not isinstance(policies, CompleteComparison):
        policies = compare_policies(prepared.batch, sequences, policies.old_logprobs_RT, prepared.version, settings)
    metrics = correction_metrics(
        policies.old_logprobs_RT,
        prepared.batch.rollout_logprobs_RT,
        policies.log_ratios,
        rejection=prepared.rejection,
        weights=policies.importance,
    )
    return {f"correction/{name}": float(value) for name, value in metrics.items()}


def _group_counts(facts: CompletionFacts, masks: Masks, dropped: Mapping[DropReason, int]) -> Metrics:
    groups = Grouping(facts.group_ids_C, masks.baseline_C, facts.num_groups)
    tied_G = groups.tied(masks.rewards_C) & (groups.count_G > 1)
    return {
        "groups/kept": facts.num_groups,
        "groups/tie": int(tied_G.sum()),
        "groups/singleton": int((groups.count_G == 1).sum()),
        **{f"groups/dropped/{reason}": count for reason, count in sorted(dropped.items())},
    }


def add_dropped(metrics: Mapping[str, float], counters: Mapping[str, int]) -> Metrics:
    """Return a step's metrics with the completions of groups that were dropped on the way to it.

    Without them a verifier that measures nothing of whole groups would leave no trace in a figure of validity.

    Args:
        metrics: of the batch.
        counters: `rows/STATE` and `truncated/REASON` of the dropped groups.
    """
    found: Metrics = dict(metrics)
    for name, count in sorted(counters.items()):
        found[name] = found.get(name, 0) + count
    if total := sum(count for name, count in found.items() if name.startswith("rows/")):
        found["valid_fraction"] = found.get("rows/valid", 0) / total
    return found


def omit_constants(metrics: Mapping[str, float], settings: Settings) -> dict[str, float]:
    """Leave out ratios, and what is derived from them, if the settings keep them at 1.

    With `algorithm.proximal = "recompute"` and a single update, ratios compare the policy in training with itself. How
    far the batch is off-policy is then in `correction/*` alone.
    """
    if settings.ratios_move:
        return dict(metrics)
    return {name: value for name, value in metrics.items() if not name.startswith(_FROM_RATIOS)}


def _part_metrics(batch: Batch, masks: Masks, filtered: Sequence[GroupRewards]) -> Metrics:
    tables = [batch.parts.select(masks.baseline_C), *(group.parts.select(group.baseline_C) for group in filtered)]
    parts, metrics = merge_tables(tables), Metrics()
    for name, values_C, has_C in zip(parts.names, parts.values_PC, parts.has_part_PC, strict=True):
        metrics |= _summary(f"reward/part/{name}", values_C[has_C])
    return metrics


def _pass_at_k(
    facts: CompletionFacts, masks: Masks, filtered: Sequence[GroupRewards], success_threshold: float
) -> Metrics:
    """Compute pass@k over trained and filtered groups: most groups that are all right or all wrong are filtered."""
    groups = Grouping(facts.group_ids_C, masks.baseline_C, facts.num_groups)
    right_G = groups.sum((masks.rewards_C >= success_threshold).double())
    others = [
        (
            len(group.baseline_C),
            int(group.baseline_C.sum()),
            int((group.rewards_C >= success_threshold)[group.baseline_C].sum()),
        )
        for group in filtered
    ]
    others_3G = torch.tensor(others, dtype=torch.int64).view(-1, 3).T
    total_G = torch.cat([torch.bincount(facts.group_ids_C, minlength=facts.num_groups).cpu(), others_3G[0]])
    valid_G = torch.cat([groups.count_G.long().cpu(), others_3G[1]])
    right_G = torch.cat([right_G.long().cpu(), others_3G[2]])
    metrics: Metrics = {}
    k = 1
    while k <= (int(total_G.max()) if len(total_G) else 0):
        for name, n_G in (("valid", valid_G), ("all", total_G)):
            passed = pass_at_k(n_G, right_G, k)
            metrics |= _mean(f"pass@{k}/{name}", passed.value[passed.known])
        k *= 2
    return metrics


def _lengths_by_end(facts: CompletionFacts, masks: Masks, lengths_C: Tensor) -> Metrics:
    metrics: Metrics = {}
    for code, end in enumerate(("finished", *TRUNCATION_REASONS), start=NONE):
        metrics |= _mean(f"length/by_end/{end}", lengths_C[masks.baseline_C & (facts.truncation_reason_C == code)])
    return metrics


def _sampled_lengths(batch: Batch) -> Tensor:
    """Return the sampled tokens of each completion; each token is in exactly one row."""
    zeros_C = torch.zeros_like(batch.facts.group_ids_C)
    return zeros_C.index_add(0, batch.completion_ids_R, batch.sampled_RT.sum(dim=1))


def _summary(name: str, values: Tensor) -> Metrics:
    metrics = _mean(f"{name}/mean", values)
    if len(values) > 1:
        metrics[f"{name}/std"] = float(values.std())
    if len(values):
        metrics |= {f"{name}/min": float(values.min()), f"{name}/max": float(values.max())}
    return metrics


def _mean(name: str, values: Tensor) -> Metrics:
    return {name: float(values.double().mean())} if len(values) else {}


def _max(name: str, values: Tensor) -> Metrics:
    return {name: values.max().item()} if len(values) else {}
