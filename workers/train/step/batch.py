"""Groups as tensors: what a training step works on.

Rows are right-padded; completions, their facts and their groups stand beside the rows and are pointed to by code, so
that a completion without a row (its rollout failed before it sampled) is counted like any other. A greedy completion is
none of them: of it there is its reward, as a fact of its group. Buffers are read as they are; no token passes through
Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from stream.errors import RecordError
from stream.records import Completion, Group, Row
from stream.validity import Measured, RewardReason
from workers.train.algorithms.masks import NONE, REWARD_REASONS, ROLLOUT_REASONS, TRUNCATION_REASONS, CompletionFacts
from workers.train.step.reward_parts import greedy_completion, measured_value, part_table, turn_rewards


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """Rows, and the completions that they belong to.

    Example, one group of two completions, the second without a row; the first got 0.5 for its first turn, and 2 from a
    reward function of weight 0.5::

        tokens_RT                [[p p a a t a]]          p prompt, a sampled, t the tool's
        sampled_RT               [[. . x x . x]]
        rollout_logprobs_RT    [[0 0 -1 -2 0 -.5]]
        versions_RT              [[-1 -1 7 7 -1 8]]
        lengths_R                [6]
        completion_ids_R         [0]
        facts.group_ids_C        [0, 0]
        part_names               ("env", "style")
        parts_PC                 [[.5 0] [2 0]]
        part_weights_P           [1 .5]
        turn_rewards_RT          [[0 0 0 .5 0 0]]
    """

    tokens_RT: Tensor
    """int64, prompt and completion; 0 where padded."""
    sampled_RT: Tensor
    """bool, tokens that the policy sampled."""
    rollout_logprobs_RT: Tensor
    """float32, the engine's log-probs of sampled tokens; 0 elsewhere."""
    versions_RT: Tensor
    """int32, the policy version that sampled each token; -1 elsewhere."""
    lengths_R: Tensor
    """int64, tokens of each row without padding."""
    completion_ids_R: Tensor
    """int64, the completion that each row belongs to: rows of one completion share it."""
    facts: CompletionFacts
    """Of the completions."""
    prompt_ids: tuple[str, ...]
    """Labels of the groups."""
    greedy_rewards_G: Tensor
    """float64, reward of the group's greedy completion; 0 where `greedy_measured_G` is not set."""
    greedy_measured_G: Tensor
    """bool: there is one, its rollout did not fail, and its reward is finite."""
    greedy_truncated_G: Tensor
    """int64, why it was cut short: code into `TRUNCATION_REASONS`, or `NONE`. What follows is the policy's business."""
    part_names: tuple[str, ...]
    """Parts of rewards, in order of first appearance (`workers.train.step.reward_parts.part_table`)."""
    parts_PC: Tensor
    """float64, unweighted value of each part; 0 where absent or unmeasured. Parts by turn are added up."""
    part_weights_P: Tensor
    """float64."""
    turn_rewards_RT: Tensor
    """float64, weighted reward of each turn on the last token sampled in it; 0 elsewhere, and where the completion's
    reward is not measured."""

    @property
    def group_ids_R(self) -> Tensor:
        """int64, the group that each row belongs to."""
        return self.facts.group_ids_C[self.completion_ids_R]

    def to(self, device: torch.device, logprobs: torch.dtype = torch.float32) -> Self:
        """The same batch on another device, its log-probs in the type that the model's are made in."""
        moved: Self = replace(_to_device(self, device), facts=_to_device(self.facts, device))
        return replace(moved, rollout_logprobs_RT=moved.rollout_logprobs_RT.to(logprobs))


def collate(groups: Sequence[Group]) -> Batch:
    """Build the batch of these groups.

    Raises:
        RecordError: a row that cannot be trained as it stands (versions that do not cover the sampled tokens, a sampled
            token that nothing precedes), rewards by turn that are not one for each sampled range, several greedy
            completions; names prompt and completion.
    """
    completions = [(code, c) for code, group in enumerate(groups) for c in group.completions if not c.greedy]
    rows = [(code, row) for code, (_, completion) in enumerate(completions) for row in completion.rows]
    starts, ends, spans = [], [], []
    lasts: list[list[int]] = [[] for _ in completions]
    for code, row in rows:
        problem = _why_untrainable(row)
        if problem:
            group_code, completion = completions[code]
            prompt = groups[group_code].prompt.id
            raise RecordError(f"group {prompt}, completion {completion.index}: {problem}; the row cannot be trained")
    prompts = [len(row.prompt_ids) // 4 for _, row in rows]
    lengths_R = torch.tensor([p + len(row.token_ids) // 4 for p, (_, row) in zip(prompts, rows, strict=True)]).long()
    width = int(lengths_R.max()) if rows else 0
    for place, (before, (code, row)) in enumerate(zip(prompts, rows, strict=True)):
        lasts[code] += [place * width + before + end - 1 for _, end in row.sampled_ranges]
        base = place * (width + 1) + before
        starts += [base + start for start, _ in row.sampled_ranges]
        ends += [base + end for _, end in row.sampled_ranges]
        spans += [(base + s.start, base + s.end, s.version) for s in row.spans]
    real_RT = torch.arange(width) < lengths_R.unsqueeze(1)
    tokens_RT = torch.zeros(len(rows), width, dtype=torch.int64)
    tokens_RT[real_RT] = _concat_buffers(
        [b for _, row in rows for b in (row.prompt_ids, row.token_ids)], torch.int32
    ).long()
    sampled_RT = _fill_ranges(len(rows), width, starts, ends, [1] * len(starts)) == 1
    rollout_logprobs_RT = torch.zeros(len(rows), width, dtype=torch.float32)
    rollout_logprobs_RT[sampled_RT] = _concat_buffers([row.logprobs for _, row in rows], torch.float32)
    # Painted one higher, so that version 0 is not the same as no version.
    versions_RT = _fill_ranges(
        len(rows), width, [s for s, _, _ in spans], [e for _, e, _ in spans], [v + 1 for *_, v in spans]
    )
    turn_rewards_RT = turn_rewards([(groups[code].prompt.id, c) for code, c in completions], lasts, (len(rows), width))
    parts = part_table([completion for _, completion in completions])
    greedy = [greedy_completion(group) for group in groups]
    greedy_rewards = [measured_value(c.reward) if c is not None and c.failure is None else None for c in greedy]
    return Batch(
        tokens_RT=tokens_RT,
        sampled_RT=sampled_RT,
        rollout_logprobs_RT=rollout_logprobs_RT,
        versions_RT=(versions_RT - 1).int(),
        lengths_R=lengths_R,
        completion_ids_R=torch.tensor([code for code, _ in rows], dtype=torch.int64),
        facts=_completion_facts(completions, len(groups)),
        prompt_ids=tuple(group.prompt.id for group in groups),
        greedy_rewards_G=torch.tensor([reward or 0.0 for reward in greedy_rewards], dtype=torch.float64),
        greedy_measured_G=torch.tensor([reward is not None for reward in greedy_rewards], dtype=torch.bool),
        greedy_truncated_G=_codes(TRUNCATION_REASONS, [c and c.truncated for c in greedy]),
        part_names=parts.names,
        parts_PC=parts.values_PC,
        part_weights_P=parts.weights_P,
        turn_rewards_RT=turn_rewards_RT,
    )


def split_micro_batches(
    batch: Batch, micro_batch_tokens: int, rows_R: Tensor | None = None, *, packed: bool = False
) -> list[Tensor]:
    """Partition rows into micro-batches of at most so many tokens.

    All rows of a completion stay together, since some losses speak of whole completions. Completions are sorted by
    their longest row and packed in that order, so that padding is little; one that is over the bound by itself gets a
    micro-batch of its own.

    Args:
        batch: the rows.
        micro_batch_tokens: tokens at most; padded, that is rows times the longest row's length.
        rows_R: bool, the rows to partition; all unless given.
        packed: rows are not padded, so their own lengths are what counts.

    Returns:
        Row numbers (int64) of each micro-batch.
    """
    everything_R = torch.arange(len(batch.lengths_R), device=batch.lengths_R.device)
    chosen = everything_R if rows_R is None else everything_R[rows_R]
    if not len(chosen):
        return []
    _, codes, counts_S = torch.unique(batch.completion_ids_R[chosen], return_inverse=True, return_counts=True)
    longest_S = torch.zeros_like(counts_S).scatter_reduce(0, codes, batch.lengths_R[chosen], "amax")
    order_S = torch.argsort(longest_S, descending=True, stable=True)
    totals_S = torch.zeros_like(counts_S).index_add_(0, codes, batch.lengths_R[chosen])
    sizes: list[int] = []
    tokens = longest = 0
    facts = zip(*(x[order_S].tolist() for x in (longest_S, counts_S, totals_S)), strict=True)
    for length, rows, total in facts:
        more = total if packed else rows * longest
        if sizes and tokens + more <= micro_batch_tokens:
            sizes[-1] += rows
            tokens += more
        else:
            longest = max(length, 1)
            tokens = total if packed else rows * longest
            sizes.append(rows)
    place_S = torch.argsort(order_S)
    return list(torch.split(chosen[torch.argsort(place_S[codes], stable=True)], sizes))


def _why_untrainable(row: Row) -> str:
    """Why this row cannot be trained; empty if it can."""
    if row.sampled_ranges and row.sampled_ranges[0][0] == 0 and not row.prompt_ids:
        return "its first token was sampled, with no prompt before it"
    spans = sorted((span.start, span.end) for span in row.spans if span.end > span.start)
    if _merge_adjacent(spans) != _merge_adjacent(row.sampled_ranges):
        return "its spans of policy versions do not cover its sampled tokens"
    if any(span.version < 0 for span in row.spans):
        return "a policy version is negative"
    return ""


def _merge_adjacent(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _concat_buffers(buffers: Sequence[bytes], dtype: torch.dtype) -> Tensor:
    """Raw buffers, one after another, as one tensor."""
    joined = bytearray(b"".join(buffers))
    return torch.frombuffer(joined, dtype=dtype) if joined else torch.empty(0, dtype=dtype)


def _fill_ranges(rows: int, width: int, starts: Sequence[int], ends: Sequence[int], values: Sequence[int]) -> Tensor:
    """Zeros, with each value over its half-open range; ranges count in rows of width + 1 and do not overlap."""
    edges = torch.zeros(rows * (width + 1) + 1, dtype=torch.int64)
    values_ = torch.tensor(values, dtype=torch.int64)
    edges.index_add_(0, torch.tensor(starts, dtype=torch.int64), values_)
    edges.index_add_(0, torch.tensor(ends, dtype=torch.int64), -values_)
    return edges[:-1].cumsum(0).view(rows, width + 1)[:, :width]


def _completion_facts(completions: Sequence[tuple[int, Completion]], groups: int) -> CompletionFacts:
    rewards = [completion.reward for _, completion in completions]
    reasons = [_reward_reason(completion) for _, completion in completions]
    return CompletionFacts(
        group_ids_C=torch.tensor([code for code, _ in completions], dtype=torch.int64),
        num_groups=groups,
        rewards_C=torch.tensor([r.value if isinstance(r, Measured) else 0.0 for r in rewards], dtype=torch.float64),
        measured_C=torch.tensor([isinstance(r, Measured) for r in rewards], dtype=torch.bool),
        reward_reason_C=_codes(REWARD_REASONS, reasons),
        rollout_reason_C=_codes(ROLLOUT_REASONS, [c.failure and c.failure.reason for _, c in completions]),
        truncation_reason_C=_codes(TRUNCATION_REASONS, [c.truncated for _, c in completions]),
        drop_reason_C=torch.full((len(completions),), NONE, dtype=torch.int64),
        turns_C=torch.tensor([c.turns for _, c in completions], dtype=torch.int64),
    )


def _reward_reason(completion: Completion) -> RewardReason | None:
    """Why the reward is unknown; a completion that nobody scored has none: it is missing."""
    if isinstance(completion.reward, Measured):
        return None
    return RewardReason.MISSING if completion.reward is None else completion.reward.reason


def _codes(table: Sequence[object], values: Sequence[object]) -> Tensor:
    return torch.tensor([NONE if value is None else table.index(value) for value in values], dtype=torch.int64)


def _to_device(record: Any, device: torch.device) -> Any:
    """A dataclass with its tensors on another device."""
    tensors = {f.name: getattr(record, f.name) for f in fields(record) if isinstance(getattr(record, f.name), Tensor)}
    return replace(record, **{name: tensor.to(device) for name, tensor in tensors.items()})
