"""Groups as tensors: what a training step works on.

Rows are right-padded. Rows point to their completion and group by code, so a completion without a row (its rollout
failed before sampling) counts like any other. A greedy completion is not part of the batch; its reward is a fact of its
group. Buffers are read in place; no token passes through Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from stream.errors import RecordError
from stream.records import Completion, Group, Row
from stream.validity import Measured, RewardReason
from workers.train.algorithms.masks import NONE, REWARD_REASONS, ROLLOUT_REASONS, TRUNCATION_REASONS, CompletionFacts
from workers.train.step.branches import BranchFacts, has_branch_of_each_row
from workers.train.step.reward_parts import (
    PartKey,
    PartTable,
    greedy_completion,
    measured_value,
    merge_tables,
    part_table,
    turn_rewards,
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """Rows, and the completions and groups that they belong to.

    Example, one group of two completions, the second without a row; the first got 0.5 for its first turn, and 2 from a
    reward function of weight 0.5::

        tokens_RT              [[p p a a t a]]          p prompt, a sampled, t from the tool
        sampled_RT             [[. . x x . x]]
        rollout_logprobs_RT    [[0 0 -1 -2 0 -.5]]
        versions_RT            [[-1 -1 7 7 -1 8]]
        lengths_R              [6]
        completion_ids_R       [0]
        facts.group_ids_C      [0, 0]
        parts.names            ("env", "style")
        parts_PC               [[.5 0] [2 0]]
        part_weights_P         [1 .5]
        turn_rewards_RT        [[0 0 0 .5 0 0]]
    """

    tokens_RT: Tensor
    """int64, prompt and completion; 0 in padding."""
    sampled_RT: Tensor
    """bool, tokens that the policy sampled."""
    rollout_logprobs_RT: Tensor
    """float32, the engine's log-probs of sampled tokens; 0 elsewhere."""
    versions_RT: Tensor
    """int32, the policy version that sampled each token; -1 elsewhere."""
    lengths_R: Tensor
    """int64, tokens of each row without padding."""
    completion_ids_R: Tensor
    """int64, the completion that each row belongs to; rows of one completion share it."""
    facts: CompletionFacts
    """What is known of each completion."""
    branches: BranchFacts
    """Which branch of an agent's conversation each row is of."""
    prompt_ids: tuple[str, ...]
    """Prompt id of each group."""
    greedy_rewards_G: Tensor
    """float64, reward of the group's greedy completion; 0 unless `greedy_measured_G`."""
    greedy_measured_G: Tensor
    """bool: the group has a greedy completion, its rollout did not fail, and its reward is finite."""
    greedy_lengths_G: Tensor
    """int64, sampled tokens of the greedy completion; of its longest branch if it has several."""
    greedy_truncated_G: Tensor
    """int64, why the greedy completion was truncated: code into `TRUNCATION_REASONS`, or `NONE`."""
    part_keys: tuple[PartKey, ...]
    """Name and weight of each part of the rewards, in order of first appearance."""
    parts_PC: Tensor
    """float64, unweighted value of each part; 0 where absent or unmeasured. Parts per turn are added up."""
    has_part_PC: Tensor
    """bool: the completion has this part, and it is measured."""
    part_weights_P: Tensor
    """float64."""
    turn_rewards_RT: Tensor
    """float64, weighted reward of each turn on the last token sampled in it; 0 elsewhere, and 0 for completions whose
    reward is not measured."""

    @property
    def group_ids_R(self) -> Tensor:
        """int64, the group that each row belongs to."""
        return self.facts.group_ids_C[self.completion_ids_R]

    @property
    def parts(self) -> PartTable:
        """The parts of the rewards."""
        return PartTable(self.part_keys, self.parts_PC, self.has_part_PC)

    def to(self, device: torch.device, logprobs: torch.dtype = torch.float32) -> Self:
        """Return the batch on another device, with its log-probs in the dtype of the model's."""
        nested = {name: _to_device(getattr(self, name), device) for name in ("facts", "branches")}
        moved: Self = replace(_to_device(self, device), **nested)
        return replace(moved, rollout_logprobs_RT=moved.rollout_logprobs_RT.to(logprobs))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardStatistics:
    """Results of a pass without gradient over the tokens that may bear loss, under the old policy; 0 elsewhere."""

    old_logprobs_RT: Tensor
    sum_pi_squared_RT: Tensor
    """Sum of squared probabilities of the distribution that each token was drawn from."""
    values_RT: Tensor
    """The critic's value of the state before each token; 0 without a critic."""
    end_values_R: Tensor
    """The critic's value of the state after the last token of each row."""


def _to_device(record: Any, device: torch.device) -> Any:
    """Return a dataclass with its tensors on another device."""
    tensors = {f.name: getattr(record, f.name) for f in fields(record) if isinstance(getattr(record, f.name), Tensor)}
    return replace(record, **{name: tensor.to(device) for name, tensor in tensors.items()})


def collate(groups: Sequence[Group]) -> Batch:
    """Build the batch of these groups.

    Raises:
        RecordError: a row cannot be trained on (its versions do not cover the sampled tokens, or nothing precedes a
            sampled token), rewards per turn do not match the sampled ranges, rows are not of one branch each, or a
            group has several greedy completions. The message names prompt and completion.
    """
    for group in groups:
        for completion in group.completions:
            if not has_branch_of_each_row(completion):
                raise RecordError(
                    f"group {group.prompt.id}, completion {completion.index}: its {len(completion.rows)} rows are not "
                    "of one branch each"
                )
    completions = [(code, c) for code, group in enumerate(groups) for c in group.completions if not c.greedy]
    rows = [(code, row) for code, (_, completion) in enumerate(completions) for row in completion.rows]
    for code, row in rows:
        problem = _why_untrainable(row)
        if problem:
            group_code, completion = completions[code]
            prompt = groups[group_code].prompt.id
            raise RecordError(f"group {prompt}, completion {completion.index}: {problem}; the row cannot be trained")
    prompt_lengths = [len(row.prompt_ids) // 4 for _, row in rows]
    lengths = [before + len(row.token_ids) // 4 for before, (_, row) in zip(prompt_lengths, rows, strict=True)]
    shape = (len(rows), max(lengths, default=0))
    last_tokens: list[list[int]] = [[] for _ in completions]
    for position, (before, (code, row)) in enumerate(zip(prompt_lengths, rows, strict=True)):
        last_tokens[code] += [position * shape[1] + before + end - 1 for _, end in row.sampled_ranges]
    parts = part_table([completion for _, completion in completions])
    greedy = [greedy_completion(group) for group in groups]
    greedy_rewards = [measured_value(c.reward) if c is not None and c.failure is None else None for c in greedy]
    tokens = _token_tensors([row for _, row in rows], prompt_lengths, lengths, shape)
    return Batch(
        tokens_RT=tokens.ids_RT,
        sampled_RT=tokens.sampled_RT,
        rollout_logprobs_RT=tokens.rollout_logprobs_RT,
        versions_RT=tokens.versions_RT,
        lengths_R=torch.tensor(lengths, dtype=torch.int64),
        completion_ids_R=torch.tensor([code for code, _ in rows], dtype=torch.int64),
        facts=_completion_facts(completions, len(groups)),
        branches=BranchFacts.from_completions([completion for _, completion in completions]),
        prompt_ids=tuple(group.prompt.id for group in groups),
        greedy_rewards_G=torch.tensor([reward or 0.0 for reward in greedy_rewards], dtype=torch.float64),
        greedy_measured_G=torch.tensor([reward is not None for reward in greedy_rewards], dtype=torch.bool),
        greedy_lengths_G=torch.tensor([_sampled_tokens(c) for c in greedy], dtype=torch.int64),
        greedy_truncated_G=_codes(TRUNCATION_REASONS, [c and c.truncated for c in greedy]),
        part_keys=parts.keys,
        parts_PC=parts.values_PC,
        has_part_PC=parts.has_part_PC,
        part_weights_P=parts.weights_P,
        turn_rewards_RT=turn_rewards([(groups[code].prompt.id, c) for code, c in completions], last_tokens, shape),
    )


def merge_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches; merging one batch per group equals `collate` of the groups, bit for bit."""
    if not batches:
        return collate([])
    width = max(batch.tokens_RT.shape[1] for batch in batches)
    first_completion = list(accumulate((len(batch.facts.group_ids_C) for batch in batches), initial=0))

    def rows(name: str, fill: float = 0) -> Tensor:
        tensors = [getattr(batch, name) for batch in batches]
        return torch.cat([pad(tensor, (0, width - tensor.shape[1]), value=fill) for tensor in tensors])

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(batch, name) for batch in batches])

    parts = merge_tables([batch.parts for batch in batches])
    return Batch(
        tokens_RT=rows("tokens_RT"),
        sampled_RT=rows("sampled_RT"),
        rollout_logprobs_RT=rows("rollout_logprobs_RT"),
        versions_RT=rows("versions_RT", -1),
        lengths_R=joined("lengths_R"),
        completion_ids_R=torch.cat(
            [b.completion_ids_R + start for b, start in zip(batches, first_completion, strict=False)]
        ),
        facts=_merge_facts([batch.facts for batch in batches]),
        branches=BranchFacts.merged([batch.branches for batch in batches]),
        prompt_ids=tuple(prompt for batch in batches for prompt in batch.prompt_ids),
        greedy_rewards_G=joined("greedy_rewards_G"),
        greedy_measured_G=joined("greedy_measured_G"),
        greedy_lengths_G=joined("greedy_lengths_G"),
        greedy_truncated_G=joined("greedy_truncated_G"),
        part_keys=parts.keys,
        parts_PC=parts.values_PC,
        has_part_PC=parts.has_part_PC,
        part_weights_P=parts.weights_P,
        turn_rewards_RT=rows("turn_rewards_RT"),
    )


class _TokenTensors(NamedTuple):
    ids_RT: Tensor
    sampled_RT: Tensor
    rollout_logprobs_RT: Tensor
    versions_RT: Tensor


def _token_tensors(
    rows: Sequence[Row], prompt_lengths: Sequence[int], lengths: Sequence[int], shape: tuple[int, int]
) -> _TokenTensors:
    """Return the fields of `Batch` that hold one value per token, except rewards."""
    starts, ends, spans = [], [], []
    for position, (before, row) in enumerate(zip(prompt_lengths, rows, strict=True)):
        base = position * (shape[1] + 1) + before
        starts += [base + start for start, _ in row.sampled_ranges]
        ends += [base + end for _, end in row.sampled_ranges]
        spans += [(base + s.start, base + s.end, s.version) for s in row.spans]
    real_RT = torch.arange(shape[1]) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
    tokens_RT = torch.zeros(shape, dtype=torch.int64)
    tokens_RT[real_RT] = _concat_buffers(
        [b for row in rows for b in (row.prompt_ids, row.token_ids)], torch.int32
    ).long()
    sampled_RT = _fill_ranges(shape, starts, ends, [1] * len(starts)) == 1
    rollout_logprobs_RT = torch.zeros(shape, dtype=torch.float32)
    rollout_logprobs_RT[sampled_RT] = _concat_buffers([row.logprobs for row in rows], torch.float32)
    # Filled with version + 1, so that version 0 differs from no version.
    versions_RT = _fill_ranges(shape, [s for s, _, _ in spans], [e for _, e, _ in spans], [v + 1 for *_, v in spans])
    return _TokenTensors(tokens_RT, sampled_RT, rollout_logprobs_RT, (versions_RT - 1).int())


def _why_untrainable(row: Row) -> str:
    """Return why this row cannot be trained on, or an empty string."""
    if row.sampled_ranges and row.sampled_ranges[0][0] == 0 and not row.prompt_ids:
        return "its first token was sampled, with no prompt before it"
    spans = sorted((span.start, span.end) for span in row.spans if span.end > span.start)
    if _merge_adjacent(spans) != _merge_adjacent(row.sampled_ranges):
        return "its spans of policy versions do not cover its sampled tokens"
    if any(span.version < 0 for span in row.spans):
        return "a policy version is negative"
    return ""


def _merge_adjacent(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that touch, given ranges in order."""
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _concat_buffers(buffers: Sequence[bytes], dtype: torch.dtype) -> Tensor:
    """Read raw buffers, one after another, as one tensor."""
    joined = bytearray(b"".join(buffers))
    return torch.frombuffer(joined, dtype=dtype) if joined else torch.empty(0, dtype=dtype)


def _fill_ranges(shape: tuple[int, int], starts: Sequence[int], ends: Sequence[int], values: Sequence[int]) -> Tensor:
    """Return zeros with each value over its half-open range; ranges count in rows of width + 1 and do not overlap."""
    rows, width = shape
    edges = torch.zeros(rows * (width + 1) + 1, dtype=torch.int64)
    values_ = torch.tensor(values, dtype=torch.int64)
    edges.index_add_(0, torch.tensor(starts, dtype=torch.int64), values_)
    edges.index_add_(0, torch.tensor(ends, dtype=torch.int64), -values_)
    return edges[:-1].cumsum(0).view(rows, width + 1)[:, :width]


def _completion_facts(completions: Sequence[tuple[int, Completion]], num_groups: int) -> CompletionFacts:
    rewards = [completion.reward for _, completion in completions]
    reasons = [reward_reason(completion) for _, completion in completions]
    return CompletionFacts(
        group_ids_C=torch.tensor([code for code, _ in completions], dtype=torch.int64),
        num_groups=num_groups,
        rewards_C=torch.tensor([r.value if isinstance(r, Measured) else 0.0 for r in rewards], dtype=torch.float64),
        measured_C=torch.tensor([isinstance(r, Measured) for r in rewards], dtype=torch.bool),
        reward_reason_C=_codes(REWARD_REASONS, reasons),
        rollout_reason_C=_codes(ROLLOUT_REASONS, [c.failure and c.failure.reason for _, c in completions]),
        truncation_reason_C=_codes(TRUNCATION_REASONS, [c.truncated for _, c in completions]),
        drop_reason_C=torch.full((len(completions),), NONE, dtype=torch.int64),
        turns_C=torch.tensor([c.turns for _, c in completions], dtype=torch.int64),
    )


def _merge_facts(facts: Sequence[CompletionFacts]) -> CompletionFacts:
    first_group = list(accumulate((each.num_groups for each in facts), initial=0))
    group_ids_C = torch.cat([each.group_ids_C + start for each, start in zip(facts, first_group, strict=False)])
    others = [f.name for f in fields(CompletionFacts) if f.name not in {"group_ids_C", "num_groups"}]
    return CompletionFacts(
        group_ids_C=group_ids_C,
        num_groups=first_group[-1],
        **{name: torch.cat([getattr(each, name) for each in facts]) for name in others},
    )


def reward_reason(completion: Completion) -> RewardReason | None:
    """Return why the reward is unknown; `MISSING` for a completion that was never scored."""
    if isinstance(completion.reward, Measured):
        return None
    return RewardReason.MISSING if completion.reward is None else completion.reward.reason


def _sampled_tokens(completion: Completion | None) -> int:
    """Return the sampled tokens of a completion without branches, or of its longest branch."""
    if completion is None:
        return 0
    tokens_R = torch.tensor([row.sampled_count for row in completion.rows], dtype=torch.int64)
    return int(BranchFacts.from_completions([completion]).longest_C(tokens_R, torch.zeros_like(tokens_R)))


def _codes(table: Sequence[object], values: Sequence[object]) -> Tensor:
    return torch.tensor([NONE if value is None else table.index(value) for value in values], dtype=torch.int64)
