"""Deadlines that share a timer: each passes in time, unless it is cancelled."""

import asyncio
import itertools
import math
import random

import anyio
import pytest

from stream.deadlines import Deadlines

SLACK_S = 0.5


def deadlines() -> tuple[Deadlines, asyncio.AbstractEventLoop]:
    loop = asyncio.get_running_loop()
    return Deadlines(loop), loop


async def test_those_with_any_timeout_pass_in_time_and_cancelled_ones_never():
    made, loop = deadlines()
    passed: dict[int, float] = {}
    draw = random.Random(5)
    due, cancelled = {}, set()
    for number in range(300):
        timeout_s = draw.choice((0.0, 0.01, 0.05, 0.2, 0.05 + draw.random() / 10))
        due[number] = loop.time() + timeout_s
        deadline = made.add(timeout_s, lambda number=number: passed.setdefault(number, loop.time()))
        if draw.random() < 0.5:
            deadline.cancel()
            cancelled.add(number)
        if number % 30 == 0:
            await anyio.sleep(0.005)
    await anyio.sleep(0.3 + SLACK_S)
    assert set(passed) == set(due) - cancelled
    assert all(due[number] <= at < due[number] + SLACK_S for number, at in passed.items())


async def test_one_that_is_added_while_another_pends_has_its_own_time():
    made, loop = deadlines()
    passed = []
    began = loop.time()
    for _ in range(4):
        made.add(0.1, lambda: passed.append(loop.time() - began))
        await anyio.sleep(0.05)
    await anyio.sleep(0.1 + SLACK_S)
    assert [round(at / 0.05) for at in passed] == [2, 3, 4, 5]


async def test_a_passed_one_may_cancel_another_and_add_one():
    made, _ = deadlines()
    passed = []

    def first() -> None:
        passed.append("first")
        second.cancel()
        made.add(0.01, lambda: passed.append("third"))

    made.add(0.01, first)
    second = made.add(0.01, lambda: passed.append("second"))
    await anyio.sleep(0.1)
    assert passed == ["first", "third"]


async def test_an_error_in_one_keeps_no_later_one_from_passing():
    made, loop = deadlines()
    errors, passed = [], []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fail() -> None:
        raise ValueError("broken")

    made.add(0.01, fail)
    made.add(0.01, lambda: passed.append("at the same time"))
    await anyio.sleep(0.005)
    made.add(0.01, lambda: passed.append("later"))
    await anyio.sleep(0.1)
    loop.set_exception_handler(None)
    assert [str(error) for error in errors] == ["broken"]
    assert passed == ["at the same time", "later"]


async def test_an_infinite_one_never_passes_and_a_finite_one_after_it_does():
    made, _ = deadlines()
    passed = []
    made.add(math.inf, lambda: passed.append("infinite"))
    made.add(0.01, lambda: passed.append("finite"))
    await anyio.sleep(0.1)
    assert passed == ["finite"]


@pytest.mark.parametrize("keeps_one", [False, True])
async def test_queues_without_a_deadline_are_removed(keeps_one):
    """Timeouts that are computed from the clock all differ."""
    made, loop = deadlines()
    passed = []
    if keeps_one:
        made.add(0.3, lambda: passed.append(1))
    began = len(loop._scheduled) if hasattr(loop, "_scheduled") else None
    for number in itertools.islice(itertools.count(), 1000):
        made.add(60 + number / 7, lambda: None).cancel()
    assert len(made._queues) <= 65
    if began is not None:  # timers that are cancelled wait for the loop to drop them
        assert sum(not timer.cancelled() for timer in loop._scheduled) <= began + 65
    await anyio.sleep(0.3 + 0.1)
    assert passed == [1] * keeps_one
