"""Pause, resume and stop: how and when the roles of a running run notice."""

import os
import signal
import time

import anyio
import pytest
from redis import Redis

from stream.connection.run_connection import connect
from stream.errors import PenstockError, RunFailedError
from stream.operator.control import pause, resume, stop
from stream.operator.status import read_status
from stream.queue.feed import Feed
from stream.records import Prompt
from stream.trainer.consumer import Consumer
from stream.trainer.leased_group import ResumePoint
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from workers.cli.operate import send_command
from workers.launch.role_process import _run_connected
from workers.role.context import WorkerContext
from workers.role.work_loop import work_loop
from workers.runs.find import open_run
from workers.runs.progress import Progress
from workers.runs.run import Run
from workers.settings.toml_file import dump_settings, parse_settings
from workers.terminal.queues import show_queues
from workers.train.groups.collector import Collector
from workers.train.groups.group_checker import GroupChecker

pytestmark = pytest.mark.usefixtures("silent_logs")

ANN = "ann@box"


def settings_in(folder, run, **tables):
    base = {
        "run": {"name": run, "folder": str(folder)},
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rewards": [{"ref": "r:f"}],
    }
    return parse_settings(base | tables)


# --- pause


async def test_a_paused_run_gives_out_no_prompt_new_released_or_expired(pipe):
    await pipe.feed("fresh", "back", "held", "expired")
    worker, dead = pipe.stage("prompts"), pipe.stage("prompts", "dead", lease_s=0.05)
    (_expired,) = (await dead.claim(1)).leases
    (back,) = (await worker.claim(1)).leases
    await worker.release(back, "infra", "no tool server")
    await pause(pipe.connection, ANN)
    await anyio.sleep(0.06)
    claim = await pipe.stage("prompts", "other").claim(10)
    assert (claim.leases, claim.paused) == ([], True)
    assert claim.next_due_s is None, "it would ask again and again until the pause is over"
    await resume(pipe.connection, ANN)
    claim = await pipe.stage("prompts", "other").claim(10)
    assert (len(claim.leases), claim.paused) == (4, False)
    found = [(lease.infra_failures, lease.deaths) for lease in claim.leases]
    assert sorted(found) == [(0, 0), (0, 0), (0, 1), (1, 0)], "the pause itself is no failure of anybody"


async def test_groups_in_progress_are_finished_scored_and_trained_while_paused(pipe, tmp_path):
    await pipe.feed("a", "b")
    rollout, score, train = pipe.stage("prompts"), pipe.stage("groups"), pipe.stage("scored")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    (lease,) = (await rollout.claim(1)).leases
    await pause(pipe.connection, ANN)
    await rollout.complete(lease, "groups", pipe.group("a"))
    (lease,) = (await score.claim(1)).leases
    await score.release(lease, "infra", "the verifier crashed")  # other stages still retry
    await anyio.sleep(0.03)
    await pipe.stage("groups", "dies", lease_s=0.05).claim(1)  # and reclaim expired leases
    waiting = await score.claim(1)
    assert waiting.next_due_s is not None
    await anyio.sleep(0.06)
    (lease,) = (await score.claim(1)).leases
    await score.complete(lease, "scored", pipe.group("a"))
    (lease,) = (await train.claim(1)).leases
    assert await trainer_lease.commit(train, [EndedGroup(lease, Trained())], 1) == []
    await trainer_lease.publish(1, tmp_path, 1, {})
    assert (await rollout.claim(1)).leases == []
    assert await pipe.prompt_counts() == {"fed": 2, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 1}


async def test_resume_wakes_a_waiting_worker_without_polling(pipe):
    await pipe.feed("a")
    await pause(pipe.connection, ANN)
    worker, claims, got = pipe.stage("prompts"), 0, anyio.Event()
    claim_once = worker.claim

    async def counted(count):
        nonlocal claims
        claims += 1
        return await claim_once(count)

    async def work(lease, _version):
        await worker.complete(lease, "groups", pipe.group("a"))
        got.set()

    worker.claim = counted
    async with anyio.create_task_group() as tasks:
        stopping = anyio.Event()
        tasks.start_soon(lambda: work_loop(worker, work, concurrency=4, stopping=stopping))
        await anyio.sleep(1.0)
        assert claims == 1
        began = time.monotonic()
        await resume(pipe.connection, ANN)
        await got.wait()
        assert time.monotonic() - began < 1.0  # without a wake-up the wait ends after five seconds
        stopping.set()


async def test_nothing_is_fed_while_the_run_is_paused(pipe):
    await pipe.feed("a")
    await pause(pipe.connection, ANN)
    feed, fed = Feed(pipe.connection, 100), anyio.Event()
    again = await feed.put([Prompt(id="a", messages=[])], "", "1;")  # the reply was lost, so the call is repeated
    assert again == 1

    async def put():
        await feed.put([Prompt(id="b", messages=[])], "1;", "2;")
        fed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put)
        await anyio.sleep(0.3)
        assert not fed.is_set()
        assert (await read_status(pipe.connection)).counts["fed"] == 1
        await resume(pipe.connection, ANN)
        with anyio.fail_after(1.0):
            await fed.wait()
    assert (await read_status(pipe.connection)).counts["fed"] == 2


async def test_a_pause_survives_restarts_of_workers_and_trainer(pipe, redis_url, tmp_path):
    await pipe.feed("a")
    await pause(pipe.connection, ANN)
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    await (await TrainerLease.acquire(pipe.connection, 30.0)).recover(ledger)
    await anyio.to_thread.run_sync(ledger.close)
    async with connect(redis_url, pipe.connection.run) as restarted:
        assert (await type(pipe)(restarted).stage("prompts").claim(1)).leases == []


async def test_the_end_of_a_run_ends_its_pause(pipe):
    await pipe.feed("a")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await pause(pipe.connection, ANN)
    await trainer_lease.finish_run("trained 3 steps")
    assert (await read_status(pipe.connection)).paused is None


async def test_the_status_says_who_paused_the_run_and_when(pipe, redis_url, capsys):
    await pipe.feed("a")
    assert (await read_status(pipe.connection)).paused is None
    await pause(pipe.connection, ANN)
    status = await read_status(pipe.connection)
    assert status.paused.paused_by == ANN
    assert 0 <= status.now_ms / 1000 - status.paused.paused_at < 10
    await anyio.to_thread.run_sync(show_queues, Run(pipe.connection.run, redis=redis_url))
    output = " ".join(capsys.readouterr().out.split())
    assert str(status.paused) in output
    await resume(pipe.connection, ANN)
    assert (await read_status(pipe.connection)).paused is None
    await anyio.to_thread.run_sync(show_queues, Run(pipe.connection.run, redis=redis_url))
    assert "paused" not in capsys.readouterr().out


@pytest.mark.parametrize("cause", ["paused", "publishing"])
async def test_a_trainer_does_not_call_a_paused_run_stalled(pipe, tmp_path, cause):
    """It wakes four times a second, and could find the timeout exceeded each time."""
    settings = settings_in(tmp_path, pipe.connection.run, abort={"stall_timeout_s": 0.5})
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    checker = GroupChecker(settings, 10, Progress())
    consumer = Consumer(trainer_lease, pipe.stage("scored"), ledger, ResumePoint(), checker.check)
    collector = Collector(settings, consumer, checker)
    await pipe.feed("a")
    if cause == "paused":
        await pause(pipe.connection, ANN)
    resumed = False
    with pytest.RaisesGroup(pytest.RaisesExc(RunFailedError, match=r"abort.stall_timeout_s = 0.5 s")):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collector.collect, 1, lambda: cause == "publishing" and not resumed)
            for _ in range(5):
                await pipe.connection.write_hash("meta", {"capacity": "8"})
                await anyio.sleep(0.25)
            if cause == "paused":
                await resume(pipe.connection, ANN)
            resumed = True
            for _ in range(20):
                await pipe.connection.write_hash("meta", {"capacity": "8"})
                await anyio.sleep(0.25)
    assert resumed, f"it gave up while the run was {cause}"
    await anyio.to_thread.run_sync(ledger.close)


# --- the output of the commands


async def test_commands_without_effect_are_refused(pipe, redis_url):
    with pytest.raises(PenstockError, match="is not paused"):
        await resume(pipe.connection, ANN)
    await pause(pipe.connection, ANN)
    with pytest.raises(PenstockError, match=r"is paused by ann@box since .* UTC already; `penstock resume`"):
        await pause(pipe.connection, "bob@box")
    assert (await read_status(pipe.connection)).paused.paused_by == ANN
    await pipe.connection.write_hash("meta", {"finished": "trained 3 steps"})
    for word in (pause, resume, stop):
        with pytest.raises(
            PenstockError, match=rf"has finished \(trained 3 steps\); there is nothing to {word.__name__}"
        ):
            await word(pipe.connection, ANN)
    async with connect(redis_url, "nobody", create=False) as visitor:
        for word in (pause, resume, stop):
            with pytest.raises(PenstockError, match="has no run named 'nobody'"):
                await word(visitor, ANN)
    with Redis.from_url(redis_url) as redis:
        assert redis.keys("{nobody}*") == []


async def test_each_command_prints_one_line(pipe, redis_url, run_name, capsys):
    async def told(word) -> str:
        await anyio.to_thread.run_sync(send_command, word, Run(run_name, redis=redis_url))
        return capsys.readouterr().out

    assert (await told("pause")).startswith(f"run '{run_name}' is paused: ")
    assert "@" in (await read_status(pipe.connection)).paused.paused_by
    assert await told("resume") == f"run '{run_name}' continues (no trainer is connected at the moment)\n"
    await TrainerLease.acquire(pipe.connection, 30.0)
    output = await told("stop")
    assert "is stopping" in output
    assert "no trainer" not in output


def test_a_stopped_run_is_not_started_for_a_command(tmp_path):
    settings = settings_in(tmp_path, "rests")
    (tmp_path / "redis").mkdir()
    (tmp_path / "run.toml").write_text(dump_settings(settings))
    with pytest.raises(PenstockError, match=r"run 'rests' is not running, so there is nothing to pause; `penstock run"):
        send_command("pause", open_run(tmp_path, must_have_begun=True))


# --- stop


async def test_a_stopping_process_claims_nothing_more(pipe):
    await pipe.scored("a")
    await stop(pipe.connection, ANN)
    assert not pipe.connection.stopping.is_set()
    claim = await pipe.stage("scored").claim(1)
    assert (claim.leases, claim.next_due_s) == ([], None)
    assert pipe.connection.stopping.is_set()


async def test_a_busy_worker_notices_a_stop_when_it_renews_leases(pipe):
    await pipe.feed("a")
    worker = pipe.stage("prompts", lease_s=0.3)
    await worker.claim(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.renew_leases)
        await anyio.sleep(0.15)
        assert not pipe.connection.stopping.is_set()
        await stop(pipe.connection, ANN)
        with anyio.fail_after(2):
            await pipe.connection.stopping.wait()
        tasks.cancel_scope.cancel()


async def test_a_trainer_in_a_long_step_notices_a_stop_when_it_renews_its_lease(pipe):
    trainer_lease = await TrainerLease.acquire(pipe.connection, 0.3)
    await stop(pipe.connection, ANN)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(trainer_lease.renew_forever)
        with anyio.fail_after(2):
            await pipe.connection.stopping.wait()
        tasks.cancel_scope.cancel()


async def test_a_waiting_feeder_notices_a_stop_immediately(pipe):
    feed = Feed(pipe.connection, 1)
    await feed.put([Prompt(id="a", messages=[])], "", "1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.put, [Prompt(id="b", messages=[])], "1", "2")
        await anyio.sleep(0.2)
        await stop(pipe.connection, ANN)
        with anyio.fail_after(1):
            await pipe.connection.stopping.wait()
        tasks.cancel_scope.cancel()


async def test_a_stop_does_not_affect_later_starts(pipe, pipe_on, redis_url):
    await pipe.feed("a", "b")
    await stop(pipe.connection, ANN)
    async with connect(redis_url, pipe.connection.run) as later:
        assert len((await pipe_on(later).stage("prompts").claim(1)).leases) == 1
        assert not later.stopping.is_set()
        await stop(later, ANN)
        assert (await pipe_on(later).stage("prompts", "again").claim(1)).leases == []
        assert later.stopping.is_set()


async def test_two_stop_requests_differ_even_if_the_clock_was_set_back(pipe, redis_url):
    await pipe.connection.write_hash("meta", {"stop": str(8 * 10**15)})
    async with connect(redis_url, pipe.connection.run) as later:
        await stop(later, ANN)
        await later.poll_stop()
        assert later.stopping.is_set()


@pytest.mark.parametrize(("signals", "finishes"), [(0, True), (1, True), (2, False)])
async def test_the_first_signal_does_not_interrupt_a_drain_after_a_stop(pipe, redis_url, tmp_path, signals, finishes):
    """The supervisor signals all roles after a stop, although each has noticed the stop itself."""
    finished = False

    async def main(role: WorkerContext) -> None:
        nonlocal finished
        await stop(pipe.connection, ANN)
        await pipe_stage(role).claim(1)
        assert role.stopping.is_set()
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep(0.1)
        await anyio.sleep(0.2)
        finished = True

    def pipe_stage(role: WorkerContext):
        return type(pipe)(role.connection).stage("scored")

    settings = settings_in(tmp_path, pipe.connection.run, queue={"shutdown_timeout_s": 5.0})
    with anyio.fail_after(4):
        await _run_connected("score", settings, redis_url, main, has_folder=True)
    assert finished == finishes


async def test_a_drain_after_a_stop_ends_with_the_shutdown_timeout(pipe, redis_url, tmp_path):
    async def main(role: WorkerContext) -> None:
        await stop(pipe.connection, ANN)
        await role.connection.poll_stop()
        await anyio.sleep(60)

    settings = settings_in(tmp_path, pipe.connection.run, queue={"shutdown_timeout_s": 0.2})
    with anyio.fail_after(4):
        await _run_connected("score", settings, redis_url, main, has_folder=True)
