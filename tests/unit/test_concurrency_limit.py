"""A limit on concurrent work: the number of slots, and the order of waiting tasks."""

import anyio

from workers.role.concurrency import ConcurrencyLimit


async def test_a_full_limit_is_waited_for_until_a_slot_is_released():
    limit = ConcurrencyLimit(2)
    assert await limit.wait_available() == 2
    limit.acquire()
    assert await limit.wait_available() == 1
    limit.acquire()
    free = []

    async def wait() -> None:
        free.append(await limit.wait_available())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert free == []
        limit.release()
    assert free == [1]


def test_a_slot_takes_one_of_the_parent_too():
    parent = ConcurrencyLimit(3)
    limit = ConcurrencyLimit(2, parent)
    limit.acquire()
    assert (limit.in_use, parent.in_use) == (1, 1)
    limit.release()
    assert (limit.in_use, parent.in_use) == (0, 0)
