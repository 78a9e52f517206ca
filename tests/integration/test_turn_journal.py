"""The journal of an agent's turns: what one worker sampled, the next one gives to the same requests."""

import pytest
import structlog

from stream.queue.stage import Stage
from stream.records import Completion, Prompt
from tests.unit.test_agent_roles import Sequence
from tests.unit.test_episode import make_chat
from tests.unit.test_recorder import user
from workers.rollout.agent_endpoint.neutral import ModelRequest
from workers.rollout.agent_endpoint.recorder import Recorder
from workers.rollout.episode import EpisodeContext
from workers.rollout.episode_clock import EpisodeClock
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.rollout.turn_journal import TurnJournal
from workers.settings import RolloutSettings


@pytest.fixture
async def worker(pipe):
    await pipe.feed("a")
    return pipe.stage("prompts", "first", infra_attempts=3)


async def claimed(stage: Stage):
    (lease,) = (await stage.claim(1)).leases
    return lease


async def taken_over(pipe, lease, name: str):
    """Let the lease expire, and another worker claim the prompt; returns its stage and its lease."""
    await pipe.connection.redis.zadd(pipe.connection.key("prompts:leases"), {lease.id: 0})
    stage = pipe.stage("prompts", name)
    return stage, await claimed(stage)


def recorder_of(journal, sampler, index=0):
    context = EpisodeContext(
        prompt=Prompt(id="a", messages=[user("a")]),
        index=index,
        chat=make_chat(),
        tool_format=TOOL_FORMATS["hermes"],
        sampler=sampler,
        slot=None,
        limits=RolloutSettings(),
        journal=journal,
    )
    return Recorder(context, Completion(index=index, seconds={"engine": 0.0}), EpisodeClock(60.0))


async def converse(recorder, *texts):
    """Say these texts one after another; returns the answers."""
    messages, answers = [], []
    for text in texts:
        messages.append(user(text))
        reply = await recorder.complete(ModelRequest(messages=list(messages)))
        messages.append(reply.message)
        answers.append(reply.text)
    return answers


async def test_the_next_worker_answers_from_the_journal_and_samples_what_is_new(pipe, worker):
    lease = await claimed(worker)
    first = Sequence(["one", "two", "other"])
    journal = await TurnJournal.open(worker, lease)
    recorder = recorder_of(journal, first)
    assert await converse(recorder, "a", "b") == ["one", "two"]
    assert await converse(recorder_of(journal, first, index=1), "a") == ["other"]

    stage, again = await taken_over(pipe, lease, "second")
    journal, second = await TurnJournal.open(stage, again), Sequence(["three"])
    heir = recorder_of(journal, second)
    assert await converse(heir, "a", "b", "c") == ["one", "two", "three"]
    assert len(second.asked) == 1
    rows, _ = heir.record()
    before, _ = recorder.record()
    assert (len(rows), len(before)) == (1, 1)
    assert list(rows[0].tokens)[: len(before[0].tokens)] == list(before[0].tokens)
    assert rows[0].logprobs.startswith(before[0].logprobs)
    with structlog.testing.capture_logs() as logs:
        journal.report()
    assert [(line["turns"], line["worker_lost"]) for line in logs] == [(2, 1)]  # the other completion asked for nothing
    await stage.complete(again, "groups", pipe.group("a"))
    assert await pipe.connection.redis.keys(pipe.connection.key("prompts:turns:*")) == []


async def test_two_answers_to_one_conversation_come_back_in_their_order(pipe, worker):
    lease = await claimed(worker)
    recorder = recorder_of(await TurnJournal.open(worker, lease), Sequence(["one", "two"]))
    assert [*await converse(recorder, "a"), *await converse(recorder, "a")] == ["one", "two"]
    stage, again = await taken_over(pipe, lease, "second")
    heir = recorder_of(await TurnJournal.open(stage, again), Sequence([]))
    assert [*await converse(heir, "a"), *await converse(heir, "a")] == ["one", "two"]


async def test_a_damaged_turn_is_sampled_again(pipe, worker):
    lease = await claimed(worker)
    recorder = recorder_of(await TurnJournal.open(worker, lease), Sequence(["one"]))
    await converse(recorder, "a")
    key = pipe.connection.key(f"prompts:turns:{lease.id}")
    (name,) = await pipe.connection.redis.hkeys(key)
    await pipe.connection.redis.hset(key, name, b"\x81")
    stage, again = await taken_over(pipe, lease, "second")
    heir = recorder_of(await TurnJournal.open(stage, again), Sequence(["again"]))
    with structlog.testing.capture_logs() as logs:
        assert await converse(heir, "a") == ["again"]
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["journal.unreadable"]


@pytest.mark.parametrize(("turns", "deaths"), [((1, 2, 3, 4), [1, 1, 1, 1]), ((2, 2, 1, 2), [1, 2, 2, 2])])
async def test_deaths_count_in_a_row_only_if_no_attempt_gets_further(pipe, worker, turns, deaths):
    stage, lease, seen = worker, await claimed(worker), []
    for number, count in enumerate(turns):
        for turn in range(count):
            await stage.save_turn(lease, f"{number}/{turn}", b"x", turn + 1)
        stage, lease = await taken_over(pipe, lease, f"worker-{number}")
        seen.append(lease.deaths)  # from the second in a row on, a death costs an attempt instead
    assert seen == deaths


async def test_a_turn_without_the_lease_is_not_saved(pipe, worker):
    lease = await claimed(worker)
    stage, again = await taken_over(pipe, lease, "second")
    await worker.save_turn(lease, "0/a/0", b"x", 1)
    assert lease.lost
    assert await stage.load_turns(again) == {}
