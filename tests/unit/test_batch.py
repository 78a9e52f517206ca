"""Groups as tensors: what collate reads from buffers, what it refuses, and how rows are split."""

from array import array
from dataclasses import fields

import pytest
import torch

from envs.rewards.parts import merge_parts
from stream.errors import RecordError
from stream.records import Branch, BranchRole, Completion, DiscardReason, Failure, Group, Prompt, RewardPart, Row, Span
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from workers.train.algorithms.masks import NONE, REWARD_REASONS, ROLLOUT_REASONS, TRUNCATION_REASONS
from workers.train.step.batch import Batch, collate, merge_batches
from workers.train.step.micro_batches import split_micro_batches


def row(prompt, tokens, sampled, logprobs, spans):
    return Row(
        prompt_ids=array("i", prompt).tobytes(),
        token_ids=array("i", tokens).tobytes(),
        sampled_ranges=sampled,
        logprobs=array("f", logprobs).tobytes(),
        spans=[Span(*span) for span in spans],
    )


def group(name, *completions):
    return Group(prompt=Prompt(id=name, messages=[]), completions=list(completions))


TWO_TURNS = row([1, 2], [3, 4, 5, 6, 7], [(0, 2), (4, 5)], [-1, -2, -0.5], [(7, 0, 1), (8, 1, 2), (9, 4, 5)])
SHORT = row([1], [9], [(0, 1)], [-0.25], [(0, 0, 1)])
BRANCHES = [
    Branch(role=BranchRole.SIDE, rows=(2,), discarded=DiscardReason.ROLE),
    Branch(role=BranchRole.MAIN, rows=(0, 1)),
]


def test_rows_are_padded_and_every_sampled_token_has_its_log_prob_and_version():
    batch = collate([group("a", Completion(index=0, rows=[TWO_TURNS])), group("b", Completion(index=0, rows=[SHORT]))])
    assert batch.tokens_RT.tolist() == [[1, 2, 3, 4, 5, 6, 7], [1, 9, 0, 0, 0, 0, 0]]
    assert batch.sampled_RT.int().tolist() == [[0, 0, 1, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0]]
    assert batch.rollout_logprobs_RT.tolist() == [[0, 0, -1, -2, 0, 0, -0.5], [0, -0.25, 0, 0, 0, 0, 0]]
    assert batch.versions_RT.tolist() == [[-1, -1, 7, 8, -1, -1, 9], [-1, 0, -1, -1, -1, -1, -1]]
    assert batch.lengths_R.tolist() == [7, 2]
    assert batch.prompt_ids == ("a", "b")
    assert (batch.tokens_RT.dtype, batch.rollout_logprobs_RT.dtype) == (torch.int64, torch.float32)
    assert batch.versions_RT.dtype == torch.int32


def test_rows_point_to_their_completion_and_group():
    several = Completion(index=0, rows=[SHORT, TWO_TURNS])
    batch = collate([group("a", several, Completion(index=1)), group("b", Completion(index=0, rows=[SHORT]))])
    assert batch.completion_ids_R.tolist() == [0, 0, 2]
    assert batch.group_ids_R.tolist() == [0, 0, 1]
    assert batch.facts.group_ids_C.tolist() == [0, 0, 1]


def test_facts_come_from_the_records():
    batch = collate(
        [
            group(
                "a",
                Completion(index=0, rows=[SHORT], reward=Measured(0.0), turns=2),
                Completion(index=1, rows=[SHORT], reward=Unmeasured(RewardReason.TIMEOUT)),
                Completion(index=2, failure=Failure(reason=RolloutReason.ENV_RESET)),
                Completion(index=3, rows=[SHORT], reward=Measured(2.5), truncated=TruncationReason.CONTEXT),
            )
        ]
    )
    facts = batch.facts
    assert facts.measured_C.tolist() == [True, False, False, True]
    assert facts.rewards_C.tolist() == [0.0, 0.0, 0.0, 2.5]
    assert facts.reward_reason_C.tolist() == [
        NONE,
        REWARD_REASONS.index(RewardReason.TIMEOUT),
        REWARD_REASONS.index(RewardReason.MISSING),
        NONE,
    ]
    assert facts.rollout_reason_C.tolist() == [NONE, NONE, ROLLOUT_REASONS.index(RolloutReason.ENV_RESET), NONE]
    assert facts.truncation_reason_C.tolist() == [NONE, NONE, NONE, TRUNCATION_REASONS.index(TruncationReason.CONTEXT)]
    assert facts.turns_C.tolist() == [2, 0, 0, 0]
    assert facts.rewards_C.dtype == torch.float64


def test_a_row_without_sampled_tokens_has_no_loss():
    batch = collate([group("a", Completion(index=0, rows=[row([1, 2], [3], [], [], [])]))])
    assert not batch.sampled_RT.any()
    assert batch.versions_RT.tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize("groups", [[], [group("a")], [group("a", Completion(index=0))]])
def test_a_batch_may_have_no_rows(groups):
    batch = collate(groups)
    assert batch.tokens_RT.shape == (0, 0)
    assert len(batch.facts.rewards_C) == sum(len(g.completions) for g in groups)
    assert split_micro_batches(batch, 100) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (row([], [2, 3], [(0, 2)], [0] * 2, [(0, 0, 2)]), "no prompt before it"),
        (row([1], [2, 3], [(0, 2)], [0] * 2, [(0, 0, 1)]), "do not cover"),
        (row([1], [2, 3], [(0, 1)], [0], [(0, 0, 2)]), "do not cover"),
        (row([1], [2, 3], [(0, 2)], [0] * 2, [(0, 0, 2), (1, 1, 2)]), "do not cover"),
        (row([1], [2], [(0, 1)], [0], [(-1, 0, 1)]), "negative"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused_by_name(bad, why):
    with pytest.raises(RecordError, match=f"group train:3, completion 5: .*{why}"):
        collate([group("fine", Completion(index=0, rows=[SHORT])), group("train:3", Completion(index=5, rows=[bad]))])


def test_spans_may_be_unordered_empty_or_finer_than_the_ranges():
    fine = row([1], [2, 3, 4], [(0, 2), (2, 3)], [0] * 3, [(4, 2, 3), (3, 0, 2), (9, 1, 1)])
    assert collate([group("a", Completion(index=0, rows=[fine]))]).versions_RT.tolist() == [[-1, 3, 3, 4]]


# Rewards: greedy completions, parts, turns


def env(value, turn=None, name="env", weight=1.0):
    reward = value if isinstance(value, Unmeasured) else Measured(value)
    return RewardPart(name=name, reward=reward, turn=turn, weight=weight)


def completion(*parts, index=0, rows=(TWO_TURNS,), **facts):
    return Completion(index=index, rows=list(rows), parts=list(parts), reward=merge_parts(parts), **facts)


RAISED = Unmeasured(RewardReason.RAISED, "boom")
LENGTH = TRUNCATION_REASONS.index(TruncationReason.LENGTH)


def test_a_greedy_completion_sets_only_its_groups_greedy_reward():
    sampled = [completion(env(1.0)), completion(env(0.0), index=1, rows=[SHORT])]
    greedy = completion(
        env(0.25), env(3.0, name="greedy only"), index=2, greedy=True, truncated=TruncationReason.LENGTH
    )
    without, with_it = collate([group("a", *sampled)]), collate([group("a", *sampled, greedy)])
    for field in fields(Batch):
        before, after = getattr(without, field.name), getattr(with_it, field.name)
        if field.name.startswith("greedy") or field.name in {"facts", "branches"}:
            continue
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after, field.name
    for record, other in ((without.facts, with_it.facts), (without.branches, with_it.branches)):
        for field in fields(record):
            before, after = getattr(record, field.name), getattr(other, field.name)
            assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after, field.name
    assert (without.greedy_measured_G.tolist(), with_it.greedy_measured_G.tolist()) == ([False], [True])
    assert (without.greedy_rewards_G.tolist(), with_it.greedy_rewards_G.tolist()) == ([0.0], [3.25])
    assert (without.greedy_truncated_G.tolist(), with_it.greedy_truncated_G.tolist()) == ([NONE], [LENGTH])
    assert (with_it.greedy_rewards_G.dtype, with_it.greedy_measured_G.dtype) == (torch.float64, torch.bool)


@pytest.mark.parametrize(
    ("facts", "measured"),
    [
        ({"reward": Measured(0.0)}, True),
        ({"reward": Measured(float("nan"))}, False),
        ({"reward": Measured(float("inf"))}, False),
        ({"reward": RAISED}, False),
        ({}, False),
        ({"reward": Measured(2.0), "failure": Failure(reason=RolloutReason.ENGINE)}, False),
    ],
)
def test_an_unmeasured_greedy_reward_does_not_count(facts, measured):
    fine = Completion(index=1, greedy=True, reward=Measured(0.5))
    batch = collate([group("a", Completion(index=0), Completion(index=1, greedy=True, **facts)), group("b", fine)])
    assert batch.greedy_measured_G.tolist() == [measured, True]
    assert batch.greedy_rewards_G.tolist() == [0.0, 0.5]


def test_a_greedy_completion_may_be_untrainable_or_alone():
    unversioned = row([1], [2], [(0, 1)], [0], [])
    batch = collate([group("a", Completion(index=0, rows=[unversioned], greedy=True, reward=Measured(1.0)))])
    assert batch.tokens_RT.shape == (0, 0)
    assert (batch.facts.num_groups, len(batch.facts.rewards_C), batch.greedy_rewards_G.tolist()) == (1, 0, [1.0])


def test_two_greedy_completions_are_refused():
    with pytest.raises(RecordError, match="group a: 2 greedy completions"):
        collate([group("a", Completion(index=0, greedy=True), Completion(index=1, greedy=True))])


def test_parts_are_in_order_of_first_appearance_and_turn_rewards_are_summed():
    batch = collate(
        [
            group("a", completion(env(1.0, 0), env(-0.5, 1), env(4.0, name="style", weight=0.25))),
            group("b", completion(env(2.0, name="style", weight=0.25), env(0.75, name="env.won"), index=0)),
            group("c", completion(env(RAISED), env(3.0, name="style", weight=0.25))),
        ]
    )
    assert batch.parts.names == ("env", "style", "env.won")
    assert batch.parts_PC.tolist() == [[0.5, 0.0, 0.0], [4.0, 2.0, 3.0], [0.0, 0.75, 0.0]]
    assert batch.part_weights_P.tolist() == [1.0, 0.25, 1.0]
    assert (batch.parts_PC.dtype, batch.part_weights_P.dtype) == (torch.float64, torch.float64)
    rewards = (batch.part_weights_P[:, None] * batch.parts_PC).sum(dim=0)
    assert rewards[:2].tolist() == batch.facts.rewards_C[:2].tolist()


def test_a_name_with_two_weights_is_two_parts():
    old, new = env(1.0, name="style", weight=0.25), env(1.0, name="style", weight=0.5)
    batch = collate([group("a", completion(old), completion(new, index=1))])
    assert batch.parts.names == ("style", "style@0.5")
    assert batch.parts_PC.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert (batch.part_weights_P @ batch.parts_PC).tolist() == batch.facts.rewards_C.tolist()


def test_a_turn_reward_is_on_the_turns_last_token():
    turns = [env(1.0, 0, weight=0.5), env(-2.0, 1, weight=0.5)]
    batch = collate(
        [group("a", completion(*turns, env(4.0, name="style", weight=0.25)), completion(env(3.0), index=1))]
    )
    #                                     p  p  a    a  t  t  a
    assert batch.turn_rewards_RT.tolist() == [[0, 0, 0, 0.5, 0, 0, -1.0], [0.0] * 7]
    assert batch.turn_rewards_RT.dtype == torch.float64


def test_turns_are_matched_to_rows_in_order():
    several = completion(env(1.0, 2), env(2.0, 0), env(3.0, 1), rows=[SHORT, TWO_TURNS])
    batch = collate([group("a", Completion(index=0, rows=[SHORT])), group("b", several)])
    assert batch.turn_rewards_RT.tolist() == [[0.0] * 7, [0, 2.0, 0, 0, 0, 0, 0], [0, 0, 0, 3.0, 0, 0, 1.0]]


def test_adjacent_ranges_are_separate_turns():
    touching = row([1], [2, 3, 4], [(0, 2), (2, 3)], [0] * 3, [(0, 0, 3)])
    batch = collate([group("a", completion(env(1.0, 0), env(2.0, 1), rows=[touching]))])
    assert batch.turn_rewards_RT.tolist() == [[0, 0, 1.0, 2.0]]


def test_the_reward_of_an_empty_last_turn_goes_to_the_token_before():
    turns = [env(1.0, 0), env(2.0, 1), env(4.0, 2)]
    batch = collate([group("a", completion(*turns, turns=3), completion(env(1.0, 0), index=1, rows=[], turns=1))])
    assert batch.turn_rewards_RT.tolist() == [[0, 0, 0, 1.0, 0, 0, 6.0]]


@pytest.mark.parametrize("unknown", [RAISED, Unmeasured(RewardReason.TIMEOUT), Unmeasured(RewardReason.NOT_FINITE)])
def test_one_unmeasured_turn_leaves_all_tokens_without_reward(unknown):
    batch = collate([group("a", completion(env(1.0, 0), env(unknown, 1)), completion(env(1.0), index=1))])
    assert not batch.turn_rewards_RT.any()
    assert batch.facts.measured_C.tolist() == [False, True]


@pytest.mark.parametrize(
    ("parts", "turns", "why"),
    [
        ([env(1.0, 0)], 1, "1 rewards of turns, but 2 sampled ranges"),
        ([env(1.0, 0), env(1.0, 1), env(1.0, 2)], 2, "3 rewards of turns, but 2 sampled ranges"),
        ([env(1.0, i) for i in range(4)], 4, "4 rewards of turns, but 2 sampled ranges"),
        ([env(1.0, 0), env(1.0, 2)], 2, r"turns \[0, 2\]"),
        ([env(1.0, -1), env(1.0, 0)], 2, r"turns \[-1, 0\]"),
    ],
)
def test_turn_rewards_of_another_number_than_turns_are_refused(parts, turns, why):
    bad = completion(*parts, index=5, turns=turns)
    with pytest.raises(RecordError, match=f"group train:3, completion 5: .*{why}"):
        collate([group("fine", completion(env(1.0, 0), env(1.0, 1))), group("train:3", bad)])


def test_a_batch_moves_with_all_its_tensors():
    batch = collate([group("a", completion(env(1.0, 0), env(2.0, 1)), completion(env(1.0), index=1, greedy=True))])
    moved = batch.to(torch.device("meta"))
    tensors = {f.name: getattr(moved, f.name) for f in fields(Batch)}
    tensors |= {f.name: getattr(nested, f.name) for nested in (moved.facts, moved.branches) for f in fields(nested)}
    result = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    assert {value.device.type for value in result.values()} == {"meta"}
    assert result.keys() >= {"greedy_rewards_G", "parts_PC", "part_weights_P", "turn_rewards_RT", "numbers_R"}


# Micro-batches


def test_merging_one_batch_per_group_equals_collating_them_together():
    greedy = Completion(index=7, rows=[SHORT], greedy=True, reward=Measured(0.5), truncated=TruncationReason.LENGTH)
    groups = [
        group("a", completion(env(1.0, 0), env(-0.5, 1), env(4.0, name="style", weight=0.25)), greedy),
        group("no rows", Completion(index=0), Completion(index=1)),
        group("b", Completion(index=0, rows=[SHORT, TWO_TURNS]), completion(env(2.0, name="style"), index=1)),
        group("no completions"),
        group("branched", Completion(index=0, rows=[SHORT, TWO_TURNS, SHORT], branches=BRANCHES)),
        group("c", completion(env(2.0, name="style"), env(1.0, name="style", weight=0.25), index=1)),
    ]
    merged, whole = merge_batches([collate([each]) for each in groups]), collate(groups)
    for record, other in ((merged, whole), (merged.facts, whole.facts), (merged.branches, whole.branches)):
        for field in fields(record):
            ours, theirs = getattr(record, field.name), getattr(other, field.name)
            if isinstance(ours, torch.Tensor):
                assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist()), field.name
            elif field.name not in {"facts", "branches"}:
                assert ours == theirs, field.name
    assert merge_batches([]).tokens_RT.shape == collate([]).tokens_RT.shape


def rows_of(*lengths):
    rows = [row([1], [2] * (n - 1), [(0, n - 1)], [0] * (n - 1), [(0, 0, n - 1)]) for n in lengths]
    return collate([group("a", *[Completion(index=i, rows=[r]) for i, r in enumerate(rows)])])


def test_rows_are_packed_by_length_within_the_limit():
    parts = split_micro_batches(rows_of(3, 9, 4, 10, 2, 5), 20)
    assert [part.tolist() for part in parts] == [[3, 1], [5, 2, 0, 4]]


def test_a_row_over_the_limit_gets_its_own_micro_batch():
    assert [part.tolist() for part in split_micro_batches(rows_of(3, 30, 3), 6)] == [[1], [0, 2]]


def test_packed_rows_count_with_their_unpadded_lengths():
    rows = rows_of(9, 3, 4, 10, 2, 5)
    assert [part.tolist() for part in split_micro_batches(rows, 19, packed=True)] == [[3, 0], [5, 2, 1, 4]]
    assert [part.tolist() for part in split_micro_batches(rows, 19)] == [[3], [0, 5], [2, 1, 4]]


def test_only_selected_rows_are_split():
    parts = split_micro_batches(rows_of(3, 9, 4), 100, torch.tensor([True, False, True]))
    assert [part.tolist() for part in parts] == [[2, 0]]
