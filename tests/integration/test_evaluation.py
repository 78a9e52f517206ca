"""An evaluation's streams have leases and dead letters like the run's, and change nothing in the run."""

from pathlib import Path

import anyio
import msgspec
import pytest

from stream.connection.keys import EVALUATION_STAGES
from stream.connection.run_connection import connect
from stream.errors import FencedError, LeaseLostError, PenstockError
from stream.operator.audit import scan_run
from stream.operator.control import pause
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.operator.status import read_status
from stream.queue.evaluation import (
    PromptEvaluation,
    create_evaluation_streams,
    read_evaluation_environments,
    read_evaluation_progress,
    read_prompt_evaluations,
    replace_evaluation_prompts,
)
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Prompt
from stream.trainer.trainer_lease import TrainerLease
from tests.cases.records import assert_records_are_owned
from workers.role.concurrency import ConcurrencyLimit
from workers.role.work_loop import work_loop
from workers.runs.evaluations import read_groups
from workers.score.worker import encode_transcript
from workers.settings.toml_file import parse_settings
from workers.train.evaluations import EvaluationLog, EvaluationScheduler

PROMPTS = [Prompt(id=f"held:0:{number}", messages=[], environment="e", group_size=2) for number in range(12)]
OF = "these settings"


@pytest.fixture
async def trainer_lease(connection):
    await create_evaluation_streams(connection)
    await replace_evaluation_prompts(connection, PROMPTS, settings_digest=OF, data_fingerprint="file")
    return await TrainerLease.acquire(connection, 30.0)


def worker(connection, stage="eval:prompts", name="w", **terms):
    return Stage(connection, stage, name, RetryPolicy(**{"lease_s": 30.0, "backoff_s": 0.01, **terms}))


async def sample(pipe, stage, count):
    """Complete `count` prompts to the scoring stage; return their ids."""
    done = (await stage.claim(count)).leases
    for lease in done:
        await stage.complete(lease, "eval:groups", pipe.group(lease.prompt_id))
    return [lease.prompt_id for lease in done]


async def score(stage, count, **outcome):
    for lease in (await stage.claim(count)).leases:
        await stage.record_evaluation(
            lease, msgspec.json.encode(PromptEvaluation(**{"environment": "e", "valid": 2, **outcome}))
        )


async def test_evaluation_prompts_come_in_file_order_with_their_version(connection, trainer_lease):
    assert not await trainer_lease.begin_evaluation(7, 3, OF)
    claim = await worker(connection).claim(100)
    assert [lease.prompt_id for lease in claim.leases] == [prompt.id for prompt in PROMPTS]
    assert {lease.evaluated_version for lease in claim.leases} == {7}
    assert claim.unfinished_prompts == len(PROMPTS)


async def test_evaluation_counts_in_none_of_the_runs_numbers(connection, pipe, trainer_lease):
    await pipe.feed("a", "b")
    await trainer_lease.begin_evaluation(0, 0, OF)
    stage = worker(connection)
    await sample(pipe, stage, 5)
    await stage.claim(3)
    status = await read_status(connection)
    assert (status.outstanding, status.unfinished, status.counts) == (0, 2, {"fed": 2})
    training = await pipe.stage("prompts", capacity=1).claim(5)
    assert len(training.leases) == 1, "its place is free, whatever the evaluation holds"
    assert training.leases[0].evaluated_version is None
    assert training.unfinished_prompts == 2
    assert {stage.depth for stage in (await read_status(connection)).evaluation.stages.values()} == {7, 5}
    await pipe.prompt_counts()


async def test_a_group_scored_twice_leaves_one_result(connection, pipe, trainer_lease):
    await trainer_lease.begin_evaluation(0, 0, OF)
    first, second = worker(connection, name="first", lease_s=0.05), worker(connection, name="second")
    (slow, *_) = (await first.claim(1)).leases
    await anyio.sleep(0.06)
    (again,) = [lease for lease in (await second.claim(1)).leases if lease.prompt_id == slow.prompt_id]
    with pytest.raises(LeaseLostError):
        await first.complete(slow, "eval:groups", pipe.group(slow.prompt_id))
    await second.complete(again, "eval:groups", pipe.group(slow.prompt_id))
    await score(worker(connection, "eval:groups"), 9, valid=1)
    assert {prompt: result.valid for prompt, result in (await read_prompt_evaluations(connection)).items()} == {
        slow.prompt_id: 1
    }
    assert (await read_evaluation_progress(connection)).unfinished == len(PROMPTS) - 1


async def test_a_duplicate_of_an_evaluated_prompt_changes_nothing(connection, pipe, trainer_lease):
    await trainer_lease.begin_evaluation(0, 0, OF)
    (done, *_) = await sample(pipe, worker(connection), 1)
    await score(worker(connection, "eval:groups"), 9, valid=1)
    for copy in (done, "x"):
        await connection.redis.xadd(connection.key("eval:groups"), {"prompt": copy, "payload": b""})
    await score(worker(connection, "eval:groups"), 9, valid=2)
    assert {prompt: result.valid for prompt, result in (await read_prompt_evaluations(connection)).items()} == {done: 1}
    assert (await read_evaluation_progress(connection)).unfinished == len(PROMPTS) - 1


async def test_the_next_evaluation_discards_the_last_and_its_leases(connection, pipe, trainer_lease):
    await trainer_lease.begin_evaluation(0, 0, OF)
    late = worker(connection, name="late")
    leases = (await late.claim(2)).leases
    await sample(pipe, worker(connection), 4)
    scorer = worker(connection, "eval:groups")
    (unscored, *_) = (await scorer.claim(3)).leases
    await score(worker(connection, "eval:groups", "another"), 1)
    assert await assert_records_are_owned(connection) == 3
    await trainer_lease.begin_evaluation(1, 1, OF)
    assert await assert_records_are_owned(connection) == 0
    with pytest.raises(LeaseLostError):
        await late.complete(leases[0], "eval:groups", pipe.group(leases[0].prompt_id))
    with pytest.raises(LeaseLostError):
        await scorer.record_evaluation(unscored, b"{}")
    seen = await read_evaluation_progress(connection)
    assert (seen.unsampled, seen.unfinished) == (len(PROMPTS), len(PROMPTS))
    assert not await read_prompt_evaluations(connection)
    assert {lease.evaluated_version for lease in (await worker(connection, name="third").claim(99)).leases} == {1}


async def test_an_evaluation_begins_only_with_prompts_of_its_settings(connection, trainer_lease):
    after = await trainer_lease.begin_evaluation(0, 0, "other settings")
    assert after
    assert (await read_evaluation_progress(connection)).unfinished == 0
    await replace_evaluation_prompts(connection, PROMPTS[:3], settings_digest="other settings", data_fingerprint="file")
    assert not await trainer_lease.begin_evaluation(0, 0, "other settings")
    assert (await read_evaluation_progress(connection)).unfinished == 3
    assert len(await read_evaluation_environments(connection)) == 3


async def test_only_the_runs_trainer_begins_and_ends_evaluations(connection, trainer_lease):
    await trainer_lease.release()
    await TrainerLease.acquire(connection, 30.0)
    with pytest.raises(FencedError):
        await trainer_lease.begin_evaluation(0, 0, OF)
    with pytest.raises(FencedError):
        await trainer_lease.end_evaluation(b"")


async def test_a_paused_run_completes_its_running_evaluation(connection, pipe, trainer_lease):
    await pipe.feed("a")
    await trainer_lease.begin_evaluation(0, 0, OF)
    await pause(connection, "test")
    assert not (await pipe.stage("prompts").claim(5)).leases
    assert len((await worker(connection).claim(5)).leases) == 5


async def test_a_dead_letter_of_an_evaluation_ends_no_prompt_and_is_not_retried(connection, pipe, trainer_lease):
    await pipe.feed(PROMPTS[0].id)  # the held-out file may have the name of the run's
    await trainer_lease.begin_evaluation(0, 0, OF)
    stage = worker(connection)
    (lease,) = (await stage.claim(1)).leases
    assert await stage.release(lease, "data", "no such image") is False
    await anyio.sleep(0.05)
    (lease,) = (await stage.claim(1)).leases
    assert await stage.release(lease, "data", "no such image") is True
    (letter,) = await list_dead_letters(connection)
    assert (letter.stage, letter.prompt_id) == ("eval:prompts", PROMPTS[0].id)
    assert (await read_evaluation_progress(connection)).unfinished == len(PROMPTS) - 1
    assert (await pipe.prompt_counts())["outstanding"] == 1
    assert not (await scan_run(connection)).dead
    with pytest.raises(PenstockError, match="of an evaluation"):
        await retry_dead_letters(connection, [letter.id])
    await drop_dead_letters(connection, [letter.id])
    status = await read_status(connection)
    assert (status.dead, status.counts) == (0, {"fed": 1})
    assert not (await scan_run(connection)).dropped_dead


async def test_junk_in_evaluation_streams_is_dead_lettered_and_not_counted(connection, trainer_lease):
    await trainer_lease.begin_evaluation(0, 0, OF)
    await connection.redis.xadd(connection.key("eval:prompts"), {"prompt": "x", "payload": b"junk"})
    stage = worker(connection)
    junk = [lease for lease in (await stage.claim(99)).leases if lease.prompt_id == "x"]
    await stage.dead_letter(junk[0], "unreadable", "no record")
    status = await read_status(connection)
    assert (status.dead, status.counts, (await read_evaluation_progress(connection)).unfinished) == (
        1,
        {},
        len(PROMPTS),
    )


def settings(folder: Path, wait_s: float):
    table = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "a:b"}], "run": {"folder": str(folder)}}
    table |= {"abort": {"stall_timeout_s": 2 * wait_s}}
    return parse_settings(table | {"eval": {"path": "held.jsonl", "every": 2, "group_size": 2}})


async def made(tmp_path, trainer_lease, wait_s=30.0):
    """Make the trainer's evaluation objects, with the held-out prompts of these settings."""
    its = settings(tmp_path, wait_s)
    await replace_evaluation_prompts(
        trainer_lease.connection, PROMPTS, settings_digest=its.evaluation_digest, data_fingerprint="file"
    )
    book = await anyio.to_thread.run_sync(EvaluationLog, tmp_path, 99)
    evaluating = EvaluationScheduler(its, trainer_lease, book)
    await evaluating.discard_unfinished()
    return evaluating, book


async def test_a_publication_waits_until_the_evaluation_is_sampled(tmp_path, connection, pipe, trainer_lease):
    evaluating, book = await made(tmp_path, trainer_lease)
    await evaluating.begin_if_due(4, 0)
    held = anyio.Event()

    async def hold():
        await evaluating.wait_until_sampled()
        held.set()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            await sample(pipe, worker(connection), len(PROMPTS) - 1)
            await anyio.wait_all_tasks_blocked()
            assert not held.is_set()
            await sample(pipe, worker(connection), 1)
    assert held.is_set()
    await evaluating.end_if_complete()
    assert not book.results, "nothing is scored yet"
    scored = encode_transcript(pipe.group("scored"))
    await score(worker(connection, "eval:groups"), 99, successes=1, reward_sum=1.5, group=scored)
    await evaluating.end_if_complete()
    (line,) = book.results
    kept = await anyio.to_thread.run_sync(read_groups, tmp_path, 0)
    assert [group.prompt.id for group in kept] == ["scored"] * len(PROMPTS)
    assert (line.version, line.step, line.overall.n, line.overall.valid) == (4, 0, 24, 24)
    assert line.overall.mean_valid == 0.75
    assert evaluating.pop_metrics()["eval/pass@2/all"] == 1.0
    assert evaluating.pop_metrics() == {}


async def test_work_of_a_dead_worker_is_repeated_while_a_publication_waits(tmp_path, connection, pipe, trainer_lease):
    """The run has no capacity for its prompts, so all progress depends on the evaluation."""
    evaluating, _ = await made(tmp_path, trainer_lease)
    await evaluating.begin_if_due(4, 0)
    await worker(connection, name="dead", lease_s=0.2).claim(3)
    stopping, living = anyio.Event(), worker(connection, name="living")

    async def work(lease, _version):
        await living.complete(lease, "eval:groups", pipe.group(lease.prompt_id))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: work_loop(living, work, concurrency=2, stopping=stopping))
            await evaluating.wait_until_sampled()
            stopping.set()
    assert (await read_evaluation_progress(connection)).unsampled == 0


async def test_a_stalled_evaluation_delays_nothing_and_its_rest_is_missing(tmp_path, connection, pipe, trainer_lease):
    evaluating, book = await made(tmp_path, trainer_lease, wait_s=0.2)
    await evaluating.begin_if_due(4, 0)
    await sample(pipe, worker(connection), 3)
    await score(worker(connection, "eval:groups"), 3)
    with anyio.fail_after(20):
        await evaluating.wait_until_sampled()
        await evaluating.evaluate_final(5, 1)
    first, last = book.results
    assert (first.version, first.overall.valid, first.overall.invalid) == (4, 6, {"missing": 18})
    assert (last.version, last.step, last.overall.invalid) == (5, 1, {"missing": 24})


async def test_without_a_feeder_the_evaluation_is_skipped(tmp_path, connection, trainer_lease):
    evaluating, book = await made(tmp_path, trainer_lease, wait_s=0.2)
    await replace_evaluation_prompts(connection, PROMPTS, settings_digest="another life's", data_fingerprint="file")
    with anyio.fail_after(20):
        await evaluating.begin_if_due(4, 0)
        await evaluating.wait_until_sampled()
        await evaluating.evaluate_final(4, 0)
    assert not book.results


async def test_an_evaluation_that_the_server_lost_is_begun_again(tmp_path, connection, pipe, trainer_lease):
    """The server lost its last writes: it knows only the previous evaluation, which is over."""
    evaluating, book = await made(tmp_path, trainer_lease)
    await evaluating.begin_if_due(4, 0)
    await sample(pipe, worker(connection), 5)
    await trainer_lease.end_evaluation(b"")
    await connection.redis.hset(connection.key("eval"), "version", "3")
    await evaluating.end_if_complete()
    assert not book.results, "nothing of it has come"
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(evaluating.wait_until_sampled)
            while (await read_evaluation_progress(connection)).version != 4:
                await anyio.sleep(0.01)
            assert len(await sample(pipe, worker(connection), 99)) == len(PROMPTS)


async def test_a_new_trainer_discards_the_evaluation_of_another(tmp_path, connection, trainer_lease):
    evaluating, _ = await made(tmp_path, trainer_lease)
    await evaluating.begin_if_due(4, 0)
    successor, book = await made(tmp_path, trainer_lease)
    assert (await read_evaluation_progress(connection)).unfinished == 0
    assert (await read_status(connection)).evaluation.is_running is False
    await successor.begin_if_due(5, 0)
    assert (await read_status(connection)).evaluation.version == 5
    assert not book.results


async def test_an_evaluated_step_is_not_evaluated_again(tmp_path, connection, pipe, trainer_lease):
    evaluating, book = await made(tmp_path, trainer_lease)
    for step in range(4):
        await evaluating.begin_if_due(step, step)
        await sample(pipe, worker(connection), 99)
        await score(worker(connection, "eval:groups"), 99)
        await evaluating.end_if_complete()
    assert [line.step for line in book.results] == [0, 2]
    resumed, book = await made(tmp_path, trainer_lease)
    await resumed.begin_if_due(9, 2)
    assert (await read_evaluation_progress(connection)).unfinished == 0
    assert not resumed.is_final_due(2)
    assert resumed.is_final_due(3)


async def test_an_evaluation_leaves_a_worker_room_for_a_training_group(connection):
    room = ConcurrencyLimit(4)
    share = ConcurrencyLimit(2, parent=room)
    for _ in range(4):
        room.acquire()
    share.acquire()
    with anyio.move_on_after(0.01) as none_left:
        room.release()
        await room.wait_available()
    assert none_left.cancelled_caught, "the place that came free is the evaluation's"
    share.release()
    assert await room.wait_available() == 1


async def test_a_run_without_evaluation_has_no_evaluation_keys(redis_url, run_name):
    async with connect(redis_url, run_name) as connection:
        assert not await connection.redis.keys(connection.key("eval*"))
        await create_evaluation_streams(connection)
        await create_evaluation_streams(connection)
        assert len(await connection.redis.keys(connection.key("eval*"))) == len(EVALUATION_STAGES)
