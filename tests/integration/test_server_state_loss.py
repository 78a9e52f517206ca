"""A server that was killed and lost its last writes."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from stream import private_server as server
from stream.connection.keys import CONSUMER_GROUP
from stream.connection.run_connection import connect
from stream.errors import DataError, ServerError
from stream.operator.dead_letters import list_dead_letters
from stream.operator.status import read_status
from stream.private_server import private_server
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import LedgerRecord, Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from workers.datasets.mix import open_dataset_mix
from workers.feed.worker import feed
from workers.role.context import WorkerContext
from workers.settings import Settings
from workers.settings.toml_file import parse_settings


async def until(condition: Callable, within_s: float = 10.0) -> None:
    with anyio.fail_after(within_s):
        while not await condition():
            await anyio.sleep(0.02)


async def test_a_killed_private_server_restarts_with_its_data(tmp_path, run_name, pipe_on):
    async with private_server(tmp_path / "redis", fsync="always") as url, connect(url, run_name) as connection:
        await pipe_on(connection).feed("a")
        before = await connection.redis.info("server")
        os.kill(before["process_id"], signal.SIGKILL)
        assert (await read_status(connection)).stages["prompts"].depth == 1
        assert (await connection.redis.info("server"))["run_id"] != before["run_id"]


async def test_a_private_server_that_cannot_restart_ends_the_run(tmp_path, run_name, monkeypatch):
    monkeypatch.setattr(server, "_MAX_EXITS", 3)
    with pytest.RaisesGroup(pytest.RaisesExc(ServerError, match=r"died 3 times .*server\.log")):
        async with private_server(tmp_path / "redis") as url, connect(url, run_name) as connection:
            pid = (await connection.redis.info("server"))["process_id"]
            manifest = next((tmp_path / "redis").rglob("*.manifest"))
            manifest.write_text("junk")
            os.kill(pid, signal.SIGKILL)
            await anyio.sleep(20)


async def test_a_trainer_publishes_a_lost_version_again(pipe, tmp_path):
    await pipe.scored("a")
    await pipe.feed("b")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 0.3)
    trainer, rollout = pipe.stage("scored", "trainer"), pipe.stage("prompts", capacity=1)
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained())], release_version=4)
    await trainer_lease.publish(4, tmp_path, 2, {"step": 2})
    key = pipe.connection.key
    await pipe.connection.redis.hset(key("policy"), mapping={"version": "3", "step": "1"})
    await pipe.connection.redis.zadd(key("unpublished"), {lease.id: 4})
    assert (await rollout.claim(1)).leases == []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(trainer_lease.renew_forever)

        async def told() -> bool:
            status = await read_status(pipe.connection)
            return (status.version, status.policy["step"], status.metrics) == (4, "2", {"step": 2})

        await until(told)
        tasks.cancel_scope.cancel()
    assert len((await rollout.claim(1)).leases) == 1


async def test_an_older_version_never_replaces_a_newer_one(pipe, tmp_path):
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await trainer_lease.publish(5, tmp_path, 5, {})
    await trainer_lease.publish(4, tmp_path, 4, {})
    assert (await read_status(pipe.connection)).version == 5


@pytest.mark.parametrize("when", ["as the run ends", "as a trainer begins"])
async def test_a_dead_duplicate_of_a_trained_prompt_does_not_end_it(pipe, tmp_path, when):
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await pipe.feed("a", "b")
    rollout = pipe.stage("prompts")
    for lease in (await rollout.claim(2)).leases:
        await rollout.dead_letter(lease, "infra", "its workers died")
    await anyio.to_thread.run_sync(ledger.append, [LedgerRecord("a", Trained(), 1, 0, "")])  # the server lost this
    assert (await pipe.prompt_counts())["dead"] == 2
    if when == "as the run ends":
        await trainer_lease.reconcile_server(ledger)
        await trainer_lease.reconcile_server(ledger)
    else:
        await trainer_lease.recover(ledger)
    assert {letter.prompt_id: letter.ends_prompt for letter in await list_dead_letters(pipe.connection)} == {
        "a": False,
        "b": True,
    }
    counts = await pipe.prompt_counts()
    assert (counts["trained"], counts["dead"]) == (1, 1)
    assert (await read_status(pipe.connection)).counts["extra_dead_letters"] == 1
    ledger.close()


def feeder(pipe, tmp_path: Path, rows: list[str]) -> WorkerContext:
    """Make a feeder of these rows, on the connection of `pipe`."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    settings = parse_settings(
        {
            "run": {"name": pipe.connection.run, "folder": str(tmp_path / "run")},
            "model": {"path": str(tmp_path)},
            "data": {"path": str(tmp_path / "prompts.jsonl"), "shuffle": False},
            "environments": {"calculator": "calculator"},
        }
    )
    return WorkerContext(
        settings=settings, connection=pipe.connection, consumer="feed", stopping=pipe.connection.stopping
    )


ROWS = [json.dumps({"prompt": f"Say {i}."}) for i in range(5)]


async def test_a_finished_feeder_feeds_lost_prompts_again(pipe, tmp_path):
    role = feeder(pipe, tmp_path, ROWS)
    redis, key = pipe.connection.redis, pipe.connection.key

    async def is_done() -> bool:
        return await redis.hget(key("feed"), "done") == b"1"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed, role)
        await until(is_done)
        # Restore the state before the feeder started.
        await redis.delete(key("prompts"), key("unfinished"), key("counts"), key("feed"))
        await redis.xgroup_create(key("prompts"), CONSUMER_GROUP, id="0", mkstream=True)
        await until(is_done)
        assert (await read_status(pipe.connection)).stages["prompts"].depth == 5
        assert (await pipe.prompt_counts())["fed"] == 5
        # The feeder ends with the run.
        trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
        await trainer_lease.finish_run("all done")


def train_two(settings: Settings) -> tuple[list[str], int]:
    """Write a ledger of the first two prompts; return their ids and the ledger's length."""
    trained = [prompt.id for prompt in open_dataset_mix(settings).read_prompts(0, 2)[0]]
    ledger = Ledger(settings.folder / "ledger.jsonl")
    ledger.append([LedgerRecord(prompt, Trained(), 1, 0, "") for prompt in trained])
    length = ledger.sync()
    ledger.close()
    return trained, length


async def test_a_feeder_of_an_emptied_server_skips_prompts_that_the_ledger_has(pipe, tmp_path):
    role = feeder(pipe, tmp_path, ROWS)
    trained, length = await anyio.to_thread.run_sync(train_two, role.settings)
    # A trainer has resumed from a checkpoint that contains both.
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    ledger = await anyio.to_thread.run_sync(Ledger, role.settings.folder / "ledger.jsonl", length)
    await trainer_lease.recover(ledger)
    ledger.close()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed, role)
        await until(lambda: pipe.connection.redis.hexists(pipe.connection.key("feed"), "done"))
        fed = [lease.prompt_id for lease in (await pipe.stage("prompts").claim(5)).leases]
        await trainer_lease.finish_run("all done")
    assert len(fed) == 3
    assert not set(fed) & set(trained)


async def test_a_dataset_without_one_usable_row_is_an_error(pipe, tmp_path):
    with (
        pytest.RaisesGroup(pytest.RaisesExc(DataError, match="none of 2 rows is a prompt")),
        anyio.fail_after(10),
    ):
        await feed(feeder(pipe, tmp_path, [json.dumps({"question": "?"})] * 2))
