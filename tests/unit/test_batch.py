"""Groups as tensors: what collate reads from buffers, what it refuses, and how rows are split."""

from array import array

import pytest
import torch

from stream.errors import RecordError
from stream.records import Completion, Failure, Group, Prompt, Row, Span
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from workers.train.batch import collate, split
from workers.train.masks import NONE, REWARD_REASONS, ROLLOUT_REASONS, TRUNCATION_REASONS


def row(prompt, tokens, sampled, logprobs, spans):
    return Row(
        prompt_ids=array("i", prompt).tobytes(),
        token_ids=array("i", tokens).tobytes(),
        sampled=sampled,
        logprobs=array("f", logprobs).tobytes(),
        spans=[Span(*span) for span in spans],
    )


def group(name, *completions):
    return Group(prompt=Prompt(id=name, messages=[]), completions=list(completions))


TWO_TURNS = row([1, 2], [3, 4, 5, 6, 7], [(0, 2), (4, 5)], [-1, -2, -0.5], [(7, 0, 1), (8, 1, 2), (9, 4, 5)])
SHORT = row([1], [9], [(0, 1)], [-0.25], [(0, 0, 1)])


def test_rows_are_padded_and_every_sampled_token_has_its_log_prob_and_version():
    batch = collate([group("a", Completion(index=0, rows=[TWO_TURNS])), group("b", Completion(index=0, rows=[SHORT]))])
    assert batch.tokens_RT.tolist() == [[1, 2, 3, 4, 5, 6, 7], [1, 9, 0, 0, 0, 0, 0]]
    assert batch.sampled_RT.int().tolist() == [[0, 0, 1, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0]]
    assert batch.behaviour_logprobs_RT.tolist() == [[0, 0, -1, -2, 0, 0, -0.5], [0, -0.25, 0, 0, 0, 0, 0]]
    assert batch.versions_RT.tolist() == [[-1, -1, 7, 8, -1, -1, 9], [-1, 0, -1, -1, -1, -1, -1]]
    assert batch.lengths_R.tolist() == [7, 2]
    assert batch.prompt_ids == ("a", "b")
    assert (batch.tokens_RT.dtype, batch.behaviour_logprobs_RT.dtype) == (torch.int64, torch.float32)
    assert batch.versions_RT.dtype == torch.int32


def test_rows_point_to_their_completion_and_group():
    several = Completion(index=0, rows=[SHORT, TWO_TURNS])
    batch = collate([group("a", several, Completion(index=1)), group("b", Completion(index=0, rows=[SHORT]))])
    assert batch.completion_ids_R.tolist() == [0, 0, 2]
    assert batch.group_ids_R.tolist() == [0, 0, 1]
    assert batch.facts.group_ids_C.tolist() == [0, 0, 1]


def test_facts_are_what_the_producers_said():
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
    assert facts.failed_C.tolist() == [NONE, NONE, ROLLOUT_REASONS.index(RolloutReason.ENV_RESET), NONE]
    assert facts.truncated_C.tolist() == [NONE, NONE, NONE, TRUNCATION_REASONS.index(TruncationReason.CONTEXT)]
    assert facts.turns_C.tolist() == [2, 0, 0, 0]
    assert facts.rewards_C.dtype == torch.float64


def test_a_row_that_sampled_nothing_is_a_row_without_loss():
    batch = collate([group("a", Completion(index=0, rows=[row([1, 2], [3], [], [], [])]))])
    assert not batch.sampled_RT.any()
    assert batch.versions_RT.tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize("groups", [[], [group("a")], [group("a", Completion(index=0))]])
def test_a_batch_may_have_no_row(groups):
    batch = collate(groups)
    assert batch.tokens_RT.shape == (0, 0)
    assert len(batch.facts.rewards_C) == sum(len(g.completions) for g in groups)
    assert split(batch, 100) == []


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


def rows_of(*lengths):
    rows = [row([1], [2] * (n - 1), [(0, n - 1)], [0] * (n - 1), [(0, 0, n - 1)]) for n in lengths]
    return collate([group("a", *[Completion(index=i, rows=[r]) for i, r in enumerate(rows)])])


def test_rows_are_packed_by_length_within_the_bound():
    parts = split(rows_of(3, 9, 4, 10, 2, 5), 20)
    assert [part.tolist() for part in parts] == [[3, 1], [5, 2, 0, 4]]


def test_a_row_over_the_bound_gets_a_part_of_its_own():
    assert [part.tolist() for part in split(rows_of(3, 30, 3), 6)] == [[1], [0, 2]]


def test_only_chosen_rows_are_split():
    parts = split(rows_of(3, 9, 4), 100, torch.tensor([True, False, True]))
    assert [part.tolist() for part in parts] == [[2, 0]]
