"""More workers than work: the idle ones wait, make hardly any calls, and log the reason once."""

import anyio
from structlog.testing import capture_logs

from stream.codec import decode
from stream.operator.status import read_status
from stream.records import Group, Prompt
from workers.role import work_loop as lull
from workers.role.work_loop import work_loop

WORKERS, PROMPTS = 8, 4


async def calls(connection) -> int:
    """Return the number of scripts and blocking reads that this server has run."""
    stats = await connection.redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "xread"))


async def test_twice_as_many_workers_as_work_wait_quietly_and_take_what_comes(pipe, monkeypatch):
    """Each worker takes at most one prompt; half of them get none until more is fed."""
    monkeypatch.setattr(lull, "MAX_BLOCK_S", 0.3)
    release, stopping = anyio.Event(), anyio.Event()
    await pipe.feed(*(f"p{i}" for i in range(PROMPTS)))

    async def worker(name: str) -> None:
        stage = pipe.stage("prompts", name)

        async def work(lease, version) -> None:
            await release.wait()
            await stage.complete(lease, "groups", Group(prompt=decode(lease.payload, Prompt), completions=[]))

        await work_loop(stage, work, concurrency=1, stopping=stopping)

    with capture_logs() as lines, anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for i in range(WORKERS):
                tasks.start_soon(worker, f"w{i}")
            while (await read_status(pipe.connection)).stages["prompts"].claimed < PROMPTS:
                await anyio.sleep(0.01)
            await anyio.sleep(0.2)
            before, began = await calls(pipe.connection), anyio.current_time()
            await anyio.sleep(6.0)
            took = anyio.current_time() - began
            made = await calls(pipe.connection) - before
            # An idle worker makes one claim and one wait per 5 s, the longest wait; renewals come every ten seconds.
            assert made <= (WORKERS - PROMPTS) * 2 * (took / 5 + 1) + PROMPTS * (took / 10 + 1)
            await pipe.feed(*(f"q{i}" for i in range(WORKERS)))
            release.set()
            while (await read_status(pipe.connection)).stages["groups"].depth < PROMPTS + WORKERS:
                await anyio.sleep(0.01)
            stopping.set()
    awaited = [line for line in lines if line["event"] == "work.waiting"]
    assert len(awaited) == WORKERS - PROMPTS
    assert all(
        (line["stage"], line["unfinished_prompts"], line["paused"]) == ("prompts", PROMPTS, False) for line in awaited
    )
    assert [line["event"] for line in lines].count("work.available") <= len(awaited)
    assert {line["event"] for line in lines} <= {"work.waiting", "work.available"}
