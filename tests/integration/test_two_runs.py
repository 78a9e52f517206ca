"""A second run on the same server changes nothing in the first one."""

import re
from collections.abc import AsyncIterator, Iterator

import pytest

from stream.connection.run_connection import RunConnection, connect
from stream.operator.control import pause, resume, stop
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped, Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from tests.cases.records import dumped


@pytest.fixture
async def second(redis_url: str, run_name: str) -> AsyncIterator[RunConnection]:
    """A run whose name begins with the first one's."""
    async with connect(redis_url, f"{run_name}-too") as connection:
        yield connection


@pytest.fixture
def ledgers(tmp_path) -> Iterator[list[Ledger]]:
    """One ledger for each run."""
    made = [Ledger(tmp_path / f"{name}.jsonl", 0) for name in ("first", "second")]
    yield made
    for ledger in made:
        ledger.close()


def names(keys: dict[bytes, bytes | None]) -> list[bytes]:
    """Return the sorted keys without the ids of entries, which are times."""
    return sorted(re.sub(rb":payload:.*", b":payload:ID", key) for key in keys)


async def live(pipe, folder, ledger: Ledger) -> None:
    """Perform all actions of a run."""
    await pipe.scored("trained", "dropped")
    await pipe.rolled_out("unscored")
    await pipe.feed("delayed", "retried", "removed")
    trainer, worker = pipe.stage("scored", "trainer"), pipe.stage("prompts", "worker", backoff_s=50.0)
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await trainer_lease.recover(ledger)
    trained, dropped = (await trainer.claim(2)).leases
    version = await trainer_lease.reserve_version(0)
    await trainer_lease.commit(
        trainer,
        [EndedGroup(trained, Trained()), EndedGroup(dropped, Dropped("zero_variance"))],
        release_version=version,
    )
    await trainer_lease.publish(version, folder, 1, {"reward": 1.0})
    await trainer_lease.acknowledge([trained.id, dropped.id])
    delayed, *dead = (await worker.claim(3)).leases
    await worker.release(delayed, "infra", "no tool server")
    for lease in dead:
        await worker.dead_letter(lease, "unreadable", "altered")
    first, last = await list_dead_letters(pipe.connection)
    await retry_dead_letters(pipe.connection, [first.id])
    await drop_dead_letters(pipe.connection, [last.id])
    await pause(pipe.connection, "ann")
    await resume(pipe.connection, "ann")
    await stop(pipe.connection, "ann")
    await trainer_lease.finish_run("trained 1 step")
    await trainer_lease.release()


async def test_a_second_run_on_the_same_server_leaves_the_first_one_untouched(pipe, second, pipe_on, tmp_path, ledgers):
    await live(pipe, tmp_path, ledgers[0])
    before = await dumped(pipe.connection)
    assert len(before) >= 10
    await live(pipe_on(second), tmp_path, ledgers[1])
    assert await dumped(pipe.connection) == before
    assert names(await dumped(second)) == [key.replace(b"}", b"-too}", 1) for key in names(before)]
