"""What the trainer does with each entry before a step."""

import pytest

from stream.codec import encode
from stream.queue.stage import Lease
from stream.records import Completion, Group, Prompt, RewardPart
from stream.trainer.ledger import Ledger, LedgerRecord
from stream.validity import DropReason, Measured, RewardReason, Unmeasured
from tests.cases.rows import sampled_row
from workers.settings.toml_file import parse_settings
from workers.train.groups.group_buffer import GroupBuffer

SETTINGS = parse_settings(
    {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "r:f"}], "rollout": {"group_size": 2}}
)


def completion(i, reward, token=3):
    return Completion(index=i, rows=[sampled_row([token, 4], [-0.5, -0.5])], reward=reward)


def lease(prompt_id, *completions, entry="1-0"):
    group = Group(prompt=Prompt(id=prompt_id, messages=[]), completions=list(completions))
    return Lease(id=entry, prompt_id=prompt_id, payload=encode(group))


GOOD = (completion(0, Measured(1.0)), completion(1, Measured(0.0)))


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    yield ledger
    ledger.close()


@pytest.fixture
def hand(ledger):
    return GroupBuffer(SETTINGS, ledger, vocab_size=10)


def test_a_group_worth_training_is_taken_into_hand(hand):
    judgement = hand.consider(lease("d:0:1", *GOOD), 0)
    assert (judgement.ending, judgement.unreadable) == ("", "")
    assert list(hand.groups) == ["d:0:1"]


@pytest.mark.parametrize("reward", [1e19, -1.7e308])
def test_a_reward_that_nothing_can_be_computed_with_makes_its_group_unreadable(hand, reward):
    judgement = hand.consider(lease("d:0:1", completion(0, Measured(1.0)), completion(1, Measured(reward))), 0)
    assert "nothing can be computed" in judgement.unreadable
    assert not hand.groups


def test_a_huge_part_of_a_completion_that_does_not_vote_harms_nobody(hand):
    failed = completion(1, Unmeasured(RewardReason.RAISED))
    failed.parts = [RewardPart(name="env", reward=Measured(1e300))]
    judgement = hand.consider(lease("d:0:1", *GOOD, failed), 0)
    assert (judgement.ending, judgement.unreadable) == ("", "")


def test_groups_are_dealt_in_the_order_of_their_prompts(hand):
    for name in ("d:0:3", "d:0:1", "d:0:2"):
        hand.consider(lease(name, *GOOD), 0)
    leases, groups = hand.deal()
    assert [group.prompt.id for group in groups] == [lease.prompt_id for lease in leases] == ["d:0:1", "d:0:2", "d:0:3"]
    assert not hand.groups


def test_a_group_without_signal_is_dropped_with_its_reason_and_its_rows_are_counted(hand):
    judgement = hand.consider(lease("d:0:1", completion(0, Measured(1.0)), completion(1, Measured(1.0))), 0)
    assert judgement.ending == "dropped:zero_variance"
    assert judgement.states == {"valid": 2}
    counts, groups = hand.dropped()
    assert counts == {DropReason.ZERO_VARIANCE: 1}
    assert [group.prompt.id for group in groups] == ["d:0:1"]
    assert hand.dropped() == ({}, [])


def test_an_unmeasured_reward_is_not_a_number(hand):
    timeout = Unmeasured(RewardReason.TIMEOUT)
    judgement = hand.consider(lease("d:0:1", completion(0, Measured(1.0)), completion(1, timeout)), 0)
    assert judgement.ending == "dropped:min_valid_rows"
    assert judgement.states == {"valid": 1, "reward:timeout": 1}


@pytest.mark.parametrize("end", ["trained", "dropped:zero_variance"])
def test_what_the_ledger_holds_has_ended_already(hand, ledger, end):
    ledger.append([LedgerRecord("d:0:1", end, 1, 0, "h")])
    assert hand.consider(lease("d:0:1", *GOOD), 0).ending == f"already:{end}"


def test_a_second_copy_of_a_group_in_hand_takes_its_place(hand):
    first = lease("d:0:1", *GOOD, entry="1-0")
    hand.consider(first, 0)
    judgement = hand.consider(lease("d:0:1", *GOOD, entry="2-0"), 0)
    assert (judgement.ending, judgement.superseded) == ("", first)
    assert [lease.id for lease in hand.deal()[0]] == ["2-0"]


def test_a_second_copy_that_is_not_worth_training_takes_its_place_too(hand):
    first = lease("d:0:1", *GOOD, entry="1-0")
    hand.consider(first, 0)
    judgement = hand.consider(lease("d:0:1", completion(0, Measured(1.0)), entry="2-0"), 0)
    assert (judgement.ending, judgement.superseded) == ("dropped:min_valid_rows", first)
    assert hand.deal() == ([], [])


def test_a_group_in_hand_that_is_claimed_again_is_no_twin_of_itself(hand):
    hand.consider(lease("d:0:1", *GOOD, entry="1-0"), 0)
    again = lease("d:0:1", *GOOD, entry="1-0")
    assert hand.consider(again, 0).ending == ""
    assert hand.deal()[0] == [again]


def test_junk_and_foreign_tokens_are_unreadable(hand):
    assert hand.consider(Lease(id="1-0", prompt_id="d:0:1", payload=b"junk"), 0).unreadable
    foreign = lease("d:0:1", completion(0, Measured(1.0), token=10), completion(1, Measured(0.0)))
    assert "vocabulary" in hand.consider(foreign, 0).unreadable
    assert not hand.groups


def test_what_is_put_down_is_given_back(hand):
    hand.consider(lease("d:0:1", *GOOD, entry="1-0"), 0)
    hand.consider(lease("d:0:2", *GOOD, entry="2-0"), 0)
    assert [lease.id for lease in hand.put_down()] == ["1-0", "2-0"]
    assert not hand.groups
