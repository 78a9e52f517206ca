"""The journal of an agent's turns: what one worker sampled, the next one gives to the same requests."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest
import structlog

from stream.operator.audit import read_turn_counts
from stream.queue.progress_writer import ProgressWriter
from stream.queue.stage import Stage
from stream.records import Completion, Group, Prompt
from tests.cases.progress import save, turn_part
from tests.unit.test_agent_roles import Sequence
from tests.unit.test_episode import make_chat
from tests.unit.test_recorder import user
from workers.rollout.agent_endpoint.neutral import ModelRequest
from workers.rollout.agent_endpoint.recorder import Recorder
from workers.rollout.episode import EpisodeContext
from workers.rollout.episode_clock import EpisodeClock
from workers.rollout.resume import EpisodeJournal
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.rollout.turn_journal import RecordedTurn, TurnJournal
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


@asynccontextmanager
async def journal_of(stage, lease):
    """Yield a journal whose writer runs."""
    writer = ProgressWriter(stage)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        yield await TurnJournal.open(writer, lease)
        tasks.cancel_scope.cancel()


LOOP = SimpleNamespace(name="loop", runs_own_loop=True, factory=SimpleNamespace(is_replayable=False, has_effects=False))


def recorder_of(journal, sampler, index=0):
    context = EpisodeContext(
        prompt=Prompt(id="a", messages=[user("a")]),
        index=index,
        chat=make_chat(),
        tool_format=TOOL_FORMATS["hermes"],
        sampler=sampler,
        slot=None,
        limits=RolloutSettings(),
        journal=EpisodeJournal(journal, index, LOOP),
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
    lease, first = await claimed(worker), Sequence(["one", "two", "other"])
    async with journal_of(worker, lease) as journal:
        recorder = recorder_of(journal, first)
        assert await converse(recorder, "a", "b") == ["one", "two"]
        assert await converse(recorder_of(journal, first, index=1), "a") == ["other"]

    stage, again = await taken_over(pipe, lease, "second")
    second = Sequence(["three"])
    async with journal_of(stage, again) as journal:
        heir = recorder_of(journal, second)
        assert await converse(heir, "a", "b", "c") == ["one", "two", "three"]
    assert len(second.asked) == 1
    rows, _ = heir.record()
    before, _ = recorder.record()
    assert (len(rows), len(before)) == (1, 1)
    assert list(rows[0].tokens)[: len(before[0].tokens)] == list(before[0].tokens)
    assert rows[0].logprobs.startswith(before[0].logprobs)
    await stage.complete(again, "groups", pipe.group("a"))
    assert await pipe.connection.redis.keys(pipe.connection.key("prompts:turns:*")) == []


async def test_two_answers_to_one_conversation_come_back_in_their_order(pipe, worker):
    lease = await claimed(worker)
    async with journal_of(worker, lease) as journal:
        recorder = recorder_of(journal, Sequence(["one", "two"]))
        assert [*await converse(recorder, "a"), *await converse(recorder, "a")] == ["one", "two"]
    stage, again = await taken_over(pipe, lease, "second")
    async with journal_of(stage, again) as journal:
        heir = recorder_of(journal, Sequence([]))
        assert [*await converse(heir, "a"), *await converse(heir, "a")] == ["one", "two"]


async def test_a_damaged_turn_is_sampled_again(pipe, worker):
    lease = await claimed(worker)
    async with journal_of(worker, lease) as journal:
        await converse(recorder_of(journal, Sequence(["one"])), "a")
    key = pipe.connection.key(f"prompts:turns:{lease.id}")
    (name,) = await pipe.connection.redis.hkeys(key)
    await pipe.connection.redis.hset(key, name, b"\x81")
    stage, again = await taken_over(pipe, lease, "second")
    with structlog.testing.capture_logs() as logs:
        async with journal_of(stage, again) as journal:
            assert await converse(recorder_of(journal, Sequence(["again"])), "a") == ["again"]
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["progress.unreadable"]


@pytest.mark.parametrize(("turns", "deaths"), [((1, 2, 3, 4), [1, 1, 1, 1]), ((2, 2, 1, 2), [1, 2, 2, 2])])
async def test_deaths_count_in_a_row_only_if_no_attempt_gets_further(pipe, worker, turns, deaths):
    stage, lease, seen = worker, await claimed(worker), []
    for number, count in enumerate(turns):
        for turn in range(count):
            await save(stage, lease, turn_part(f"{number}/{turn}", turn + 1))
        stage, lease = await taken_over(pipe, lease, f"worker-{number}")
        seen.append(lease.deaths)  # from the second in a row on, a death costs an attempt instead
    assert seen == deaths


async def test_a_turn_without_the_lease_is_not_saved(pipe, worker):
    lease = await claimed(worker)
    stage, again = await taken_over(pipe, lease, "second")
    await save(worker, lease, turn_part("0/a/0"))
    assert lease.lost
    assert await stage.load_progress(again) == ([], {})


async def test_a_group_that_ends_at_once_counts_how_it_was_restored(pipe, worker):
    lease = await claimed(worker)
    await save(worker, lease, turn_part("0/0"))
    stage, again = await taken_over(pipe, lease, "second")
    async with journal_of(stage, again) as journal:
        completion = Completion(index=0)
        journal.save_restoration(0, "never", ["0/0"])
        journal.save_completion(completion, ["0/0"], is_urgent=False)
        await journal.close()
        await stage.complete(again, "groups", Group(prompt=Prompt(id="a", messages=[]), completions=[completion]))
    turns = await read_turn_counts(pipe.connection)
    assert (turns.sampled, turns.kept, turns.again, turns.resumed) == (1, 0, 1, {"never": 1})


async def test_a_completion_waits_for_its_group_and_a_turn_does_not(pipe, worker):
    lease = await claimed(worker)
    turns, partials = (pipe.connection.key(f"prompts:{what}:{lease.id}") for what in ("turns", "partials"))
    async with journal_of(worker, lease) as journal:
        journal.save_completion(Completion(index=1, turns=1), [], is_urgent=False)
        assert await journal.save_turn("0/0", RecordedTurn(1)).wait()
        assert await pipe.connection.redis.exists(turns, partials) == 1
        with anyio.fail_after(10):
            while not await pipe.connection.redis.exists(partials):
                await anyio.sleep(0.02)
        journal.save_completion(Completion(index=2, turns=1), [], is_urgent=False)
        await journal.close()
        assert await journal.save_turn("0/1", RecordedTurn(1)).wait()
    assert await pipe.connection.redis.hkeys(partials) == [b"1"]
