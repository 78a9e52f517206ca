"""Evaluation's streams: leases and dead letters as everywhere else, and nothing of the run's own is touched."""

from pathlib import Path

import anyio
import msgspec
import pytest

from stream import Tenure, connect, letters, look
from stream.census import take_census
from stream.dead import drop, retry
from stream.errors import FencedError, LeaseLostError, PenstockError
from stream.evaluation import Outcome, environments, gauge, hold_out, make_streams, outcomes
from stream.keys import EVALUATION_STAGES
from stream.records import Prompt
from stream.stage import Stage, Terms
from stream.steering import pause
from workers.pump import pump
from workers.room import Room
from workers.settings.file import parse
from workers.train.evaluation.evaluating import Evaluating
from workers.train.evaluation.figures import Evaluations

PROMPTS = [Prompt(id=f"held:0:{number}", messages=[], environment="e", group_size=2) for number in range(12)]
OF = "these settings"


@pytest.fixture
async def tenure(link):
    await make_streams(link)
    await hold_out(link, PROMPTS, of=OF, data="file")
    return await Tenure.begin(link, 30.0)


def worker(link, stage="eval:prompts", name="w", **terms):
    return Stage(link, stage, name, Terms(**{"lease_s": 30.0, "backoff_s": 0.01, **terms}))


async def sample(pipe, stage, count):
    """Take so many prompts to the scoring stage; returns their ids."""
    done = (await stage.claim(count)).leases
    for lease in done:
        await stage.settle(lease, "eval:groups", pipe.group(lease.prompt_id))
    return [lease.prompt_id for lease in done]


async def score(stage, count, **outcome):
    for lease in (await stage.claim(count)).leases:
        await stage.tally(lease, msgspec.json.encode(Outcome(**{"environment": "e", "valid": 2, **outcome})))


async def test_its_prompts_come_in_the_order_of_the_file_with_the_version_that_is_to_sample_them(link, tenure):
    assert not await tenure.examine(7, 3, OF)
    claim = await worker(link).claim(100)
    assert [lease.prompt_id for lease in claim.leases] == [prompt.id for prompt in PROMPTS]
    assert {lease.evaluates for lease in claim.leases} == {7}
    assert claim.open_prompts == len(PROMPTS)


async def test_nothing_of_it_is_counted_among_the_runs_own(link, pipe, tenure):
    await pipe.feed("a", "b")
    await tenure.examine(0, 0, OF)
    stage = worker(link)
    await sample(pipe, stage, 5)
    await stage.claim(3)
    view = await look(link)
    assert (view.outstanding, view.open, view.counts) == (0, 2, {"fed": 2})
    training = await pipe.stage("prompts", capacity=1).claim(5)
    assert len(training.leases) == 1, "its place is free, whatever the evaluation holds"
    assert training.leases[0].evaluates is None
    assert training.open_prompts == 2
    assert {stage.depth for stage in (await look(link)).evaluation.stages.values()} == {7, 5}
    await pipe.balance()


async def test_a_group_done_twice_leaves_one_outcome(link, pipe, tenure):
    await tenure.examine(0, 0, OF)
    first, second = worker(link, name="first", lease_s=0.05), worker(link, name="second")
    (slow, *_) = (await first.claim(1)).leases
    await anyio.sleep(0.06)
    (again,) = [lease for lease in (await second.claim(1)).leases if lease.prompt_id == slow.prompt_id]
    with pytest.raises(LeaseLostError):
        await first.settle(slow, "eval:groups", pipe.group(slow.prompt_id))
    await second.settle(again, "eval:groups", pipe.group(slow.prompt_id))
    await score(worker(link, "eval:groups"), 9, valid=1)
    assert {prompt: found.valid for prompt, found in (await outcomes(link)).items()} == {slow.prompt_id: 1}
    assert (await gauge(link)).open == len(PROMPTS) - 1


async def test_a_second_copy_of_a_prompt_that_has_an_outcome_changes_nothing(link, pipe, tenure):
    await tenure.examine(0, 0, OF)
    (done, *_) = await sample(pipe, worker(link), 1)
    await score(worker(link, "eval:groups"), 9, valid=1)
    for copy in (done, "x"):
        await link.redis.xadd(link.key("eval:groups"), {"prompt": copy, "payload": b""})
    await score(worker(link, "eval:groups"), 9, valid=2)
    assert {prompt: found.valid for prompt, found in (await outcomes(link)).items()} == {done: 1}
    assert (await gauge(link)).open == len(PROMPTS) - 1


async def test_the_next_one_forgets_the_last_and_whoever_works_on_it_has_lost_its_lease(link, pipe, tenure):
    await tenure.examine(0, 0, OF)
    late = worker(link, name="late")
    leases = (await late.claim(2)).leases
    await sample(pipe, worker(link), 4)
    scorer = worker(link, "eval:groups")
    (unscored, *_) = (await scorer.claim(3)).leases
    await score(worker(link, "eval:groups", "another"), 1)
    await tenure.examine(1, 1, OF)
    with pytest.raises(LeaseLostError):
        await late.settle(leases[0], "eval:groups", pipe.group(leases[0].prompt_id))
    with pytest.raises(LeaseLostError):
        await scorer.tally(unscored, b"{}")
    seen = await gauge(link)
    assert (seen.unsampled, seen.open) == (len(PROMPTS), len(PROMPTS))
    assert not await outcomes(link)
    assert {lease.evaluates for lease in (await worker(link, name="third").claim(99)).leases} == {1}


async def test_it_begins_only_with_prompts_that_its_own_settings_made(link, tenure):
    after = await tenure.examine(0, 0, "other settings")
    assert after
    assert (await gauge(link)).open == 0
    await hold_out(link, PROMPTS[:3], of="other settings", data="file")
    assert not await tenure.examine(0, 0, "other settings")
    assert (await gauge(link)).open == 3
    assert len(await environments(link)) == 3


async def test_only_the_runs_trainer_begins_and_concludes(link, tenure):
    await tenure.end()
    await Tenure.begin(link, 30.0)
    with pytest.raises(FencedError):
        await tenure.examine(0, 0, OF)
    with pytest.raises(FencedError):
        await tenure.conclude(b"")


async def test_a_paused_run_finishes_the_evaluation_under_way(link, pipe, tenure):
    await pipe.feed("a")
    await tenure.examine(0, 0, OF)
    await pause(link, "test")
    assert not (await pipe.stage("prompts").claim(5)).leases
    assert len((await worker(link).claim(5)).leases) == 5


async def test_what_dies_of_it_is_no_end_of_the_run_and_is_not_retried(link, pipe, tenure):
    await pipe.feed(PROMPTS[0].id)  # the held-out file may be called as the run's own
    await tenure.examine(0, 0, OF)
    stage = worker(link)
    (lease,) = (await stage.claim(1)).leases
    assert await stage.release(lease, "data", "no such image") is False
    await anyio.sleep(0.05)
    (lease,) = (await stage.claim(1)).leases
    assert await stage.release(lease, "data", "no such image") is True
    (letter,) = await letters(link)
    assert (letter.stage, letter.prompt_id) == ("eval:prompts", PROMPTS[0].id)
    assert (await gauge(link)).open == len(PROMPTS) - 1
    assert (await pipe.balance())["outstanding"] == 1
    assert not (await take_census(link)).dead
    with pytest.raises(PenstockError, match="of an evaluation"):
        await retry(link, [letter.id])
    await drop(link, [letter.id])
    view = await look(link)
    assert (view.dead, view.counts) == (0, {"fed": 1})
    assert not (await take_census(link)).removed


async def test_junk_among_its_entries_is_buried_and_counts_in_nothing(link, tenure):
    await tenure.examine(0, 0, OF)
    await link.redis.xadd(link.key("eval:prompts"), {"prompt": "x", "payload": b"junk"})
    stage = worker(link)
    junk = [lease for lease in (await stage.claim(99)).leases if lease.prompt_id == "x"]
    await stage.bury(junk[0], "unreadable", "no record")
    view = await look(link)
    assert (view.dead, view.counts, (await gauge(link)).open) == (1, {}, len(PROMPTS))


def settings(folder: Path, **section):
    table = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "a:b"}], "run": {"folder": str(folder)}}
    return parse(table | {"eval": {"path": "held.jsonl", "every": 2, "group_size": 2, "hold_s": 30.0} | section})


async def made(tmp_path, tenure, **section):
    """The trainer's part, begun, with the held-out prompts of its own settings."""
    its = settings(tmp_path, **section)
    await hold_out(tenure.link, PROMPTS, of=its.held_out, data="file")
    book = await anyio.to_thread.run_sync(Evaluations, tmp_path, 99)
    evaluating = Evaluating(its, tenure, book, anyio.Event())
    await evaluating.start()
    return evaluating, book


async def test_a_publication_is_held_until_all_is_sampled_scored_or_not(tmp_path, link, pipe, tenure):
    evaluating, book = await made(tmp_path, tenure)
    await evaluating.published(4, 0)
    held = anyio.Event()

    async def hold():
        await evaluating.hold()
        held.set()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            await sample(pipe, worker(link), len(PROMPTS) - 1)
            await anyio.wait_all_tasks_blocked()
            assert not held.is_set()
            await sample(pipe, worker(link), 1)
    assert held.is_set()
    await evaluating.look()
    assert not book.lines, "nothing is scored yet"
    await score(worker(link, "eval:groups"), 99, right=1, reward=1.5)
    await evaluating.look()
    (line,) = book.lines
    assert (line.version, line.step, line.overall.n, line.overall.valid) == (4, 0, 24, 24)
    assert line.overall.mean_valid == 0.75
    assert evaluating.metrics()["eval/pass@2/all"] == 1.0
    assert evaluating.metrics() == {}


async def test_a_worker_that_died_while_it_is_held_for_is_succeeded(tmp_path, link, pipe, tenure):
    """With a run that has no place left for its own prompts, so that all hangs on the evaluation."""
    evaluating, _ = await made(tmp_path, tenure)
    await evaluating.published(4, 0)
    await worker(link, name="dead", lease_s=0.2).claim(3)
    stopping, living = anyio.Event(), worker(link, name="living")

    async def work(lease, _version):
        await living.settle(lease, "eval:groups", pipe.group(lease.prompt_id))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: pump(living, work, at_once=2, stopping=stopping))
            await evaluating.hold()
            stopping.set()
    assert (await gauge(link)).unsampled == 0


async def test_nothing_is_held_for_an_evaluation_that_stands_still_and_what_did_not_come_is_told(
    tmp_path, link, pipe, tenure
):
    evaluating, book = await made(tmp_path, tenure, hold_s=0.2)
    await evaluating.published(4, 0)
    await sample(pipe, worker(link), 3)
    await score(worker(link, "eval:groups"), 3)
    with anyio.fail_after(20):
        await evaluating.hold()
        await evaluating.end(5, 1)
    first, last = book.lines
    assert (first.version, first.overall.valid, first.overall.invalid) == (4, 6, {"missing": 18})
    assert (last.version, last.step, last.overall.invalid) == (5, 1, {"missing": 24})


async def test_without_a_feeder_the_trainer_goes_on_without_an_evaluation(tmp_path, link, tenure):
    evaluating, book = await made(tmp_path, tenure, hold_s=0.2)
    await hold_out(link, PROMPTS, of="another life's", data="file")
    with anyio.fail_after(20):
        await evaluating.published(4, 0)
        await evaluating.hold()
        await evaluating.end(4, 0)
    assert not book.lines


async def test_a_server_that_forgot_the_evaluation_is_told_again(tmp_path, link, pipe, tenure):
    """It lost its last writes: what it knows of is the evaluation before, which is over."""
    evaluating, book = await made(tmp_path, tenure)
    await evaluating.published(4, 0)
    await sample(pipe, worker(link), 5)
    await tenure.conclude(b"")
    await link.redis.hset(link.key("eval"), "version", "3")
    await evaluating.look()
    assert not book.lines, "nothing of it has come"
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(evaluating.hold)
            while (await gauge(link)).version != 4:
                await anyio.sleep(0.01)
            assert len(await sample(pipe, worker(link), 99)) == len(PROMPTS)


async def test_a_trainer_that_begins_gives_up_what_another_had_begun(tmp_path, link, tenure):
    evaluating, _ = await made(tmp_path, tenure)
    await evaluating.published(4, 0)
    successor, book = await made(tmp_path, tenure)
    assert (await gauge(link)).open == 0
    assert (await look(link)).evaluation.under_way is False
    await successor.published(5, 0)
    assert (await look(link)).evaluation.version == 5
    assert not book.lines


async def test_a_step_that_has_a_line_is_not_evaluated_again(tmp_path, link, pipe, tenure):
    evaluating, book = await made(tmp_path, tenure)
    for step in range(4):
        await evaluating.published(step, step)
        await sample(pipe, worker(link), 99)
        await score(worker(link, "eval:groups"), 99)
        await evaluating.look()
    assert [line.step for line in book.lines] == [0, 2]
    resumed, book = await made(tmp_path, tenure)
    await resumed.published(9, 2)
    assert (await gauge(link)).open == 0
    assert not resumed.is_due_at_the_end(2)
    assert resumed.is_due_at_the_end(3)


async def test_an_evaluation_takes_places_of_the_workers_room_and_never_the_last(link):
    room = Room(4)
    share = Room(2, within=room)
    for _ in range(4):
        room.take()
    share.take()
    with anyio.move_on_after(0.01) as none_left:
        room.give()
        await room.wait()
    assert none_left.cancelled_caught, "the place that came free is the evaluation's"
    share.give()
    assert await room.wait() == 1


async def test_a_run_without_evaluation_has_no_key_of_it(redis_url, run_name):
    async with connect(redis_url, run_name) as link:
        assert not await link.redis.keys(link.key("eval*"))
        await make_streams(link)
        await make_streams(link)
        assert len(await link.redis.keys(link.key("eval*"))) == len(EVALUATION_STAGES)
