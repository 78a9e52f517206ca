"""Feeding: the prompts and the cursor are written in one step."""

import time

import anyio
import pytest

from stream.operator.status import read_status
from stream.queue.feed import CursorMovedError, Feed
from stream.records import Prompt


def prompts(*ids: str) -> list[Prompt]:
    return [Prompt(id=each, messages=[]) for each in ids]


async def depth(connection) -> int:
    return (await read_status(connection)).stages["prompts"].depth


async def test_the_cursor_moves_with_the_prompts(connection):
    feed = Feed(connection, 100)
    assert await feed.cursor() == ""
    assert await feed.put(prompts("a", "b"), "", "2") == 2
    assert await feed.put(prompts("c"), "2", "3") == 1
    assert (await feed.cursor(), await depth(connection)) == ("3", 3)


async def test_a_put_with_another_cursor_changes_nothing(connection):
    feed = Feed(connection, 100)
    await feed.put(prompts("a"), "", "1")
    with pytest.raises(CursorMovedError) as caught:
        await feed.put(prompts("x"), "7", "8")
    assert caught.value.cursor == "1"
    assert (await feed.cursor(), await depth(connection)) == ("1", 1)


async def test_a_put_repeated_after_a_lost_reply_is_one_put(connection):
    feed = Feed(connection, 100)
    for _ in range(3):
        assert await feed.put(prompts("a", "b"), "", "2") == 2
    assert (await read_status(connection)).counts == {"fed": 2}
    assert await depth(connection) == 2


async def test_an_unfinished_prompt_is_not_fed_twice(connection):
    feed = Feed(connection, 100)
    await feed.put(prompts("a"), "", "1")
    assert await feed.put(prompts("a", "b", "b"), "1", "2") == 1
    assert (await read_status(connection)).prompt_counts["fed"] == 2


async def test_omitted_prompts_count_as_fed(connection):
    feed = Feed(connection, 1)
    await feed.put(prompts("a"), "", "1")
    with anyio.fail_after(1):  # nothing is added, so the backlog is irrelevant
        await feed.put(prompts("b", "c"), "1", "3", ended={"b": "trained", "c": "dropped:stale"})
    assert ((await read_status(connection)).counts, await feed.cursor()) == (
        {"fed": 3, "trained": 1, "dropped:stale": 1},
        "3",
    )


async def test_a_full_backlog_blocks_until_a_claim(pipe):
    feed = Feed(pipe.connection, 2)
    await feed.put(prompts("a", "b"), "", "2")
    fed_at = []

    async def put() -> None:
        await feed.put(prompts("c"), "2", "3")
        fed_at.append(time.monotonic())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put)
        await anyio.sleep(0.2)
        assert fed_at == []
        claimed_at = time.monotonic()
        await pipe.stage("prompts").claim(1)
    assert fed_at[0] - claimed_at < 1.0  # a put that polled would wait for its longest block, many seconds


async def test_a_claim_of_a_released_prompt_unblocks_feeding(pipe):
    feed = Feed(pipe.connection, 2)
    await feed.put(prompts("a", "b"), "", "2")
    worker = pipe.stage("prompts")
    for lease in (await worker.claim(2)).leases:
        await worker.release(lease, "none", "")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.put, prompts("c"), "2", "3")
        await anyio.sleep(0.2)
        assert await depth(pipe.connection) == 2
        with anyio.fail_after(0.5):
            await worker.claim(1)
            while await depth(pipe.connection) < 3:
                await anyio.sleep(0.01)


async def test_a_backlog_smaller_than_a_batch_lets_batches_through_one_by_one(pipe):
    feed = Feed(pipe.connection, 1)
    await feed.put(prompts("a", "b", "c"), "", "3")
    with anyio.move_on_after(0.2):
        await feed.put(prompts("d", "e"), "3", "5")
    assert await depth(pipe.connection) == 3
    await pipe.stage("prompts").claim(3)
    with anyio.fail_after(1):
        await feed.put(prompts("d", "e"), "3", "5")


async def test_a_batch_of_a_thousand(connection):
    assert await Feed(connection, 10_000).put(prompts(*(f"p{i}" for i in range(1000))), "", "1000") == 1000


async def test_every_claim_reports_the_end_of_feeding(pipe):
    claim = await pipe.stage("scored").claim(1)
    assert not claim.feed_done
    feed = Feed(pipe.connection, 10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipe.stage("scored").wait, claim)
        with anyio.fail_after(1):
            await feed.finish()
    assert (await pipe.stage("scored").claim(1)).feed_done
    assert await feed.finish_reason() == ""
