"""For whom a step waits, and how long."""

import pytest

from workers.train.groups import stragglers
from workers.train.groups.stragglers import Stragglers


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stragglers.time, "monotonic", lambda: now[0])
    return now


def test_it_waits_until_none_has_come_for_so_long(clock):
    waiting = Stragglers(10.0)
    assert waiting.given_up({"a": 3, "b": 3}) == set()
    assert waiting.keep_waiting(["a", "b"], paused=False)
    clock[0] += 9
    assert waiting.left_s == pytest.approx(1.0, abs=0.01)
    assert waiting.keep_waiting(["b"], paused=False)  # a has come
    clock[0] += 9
    assert waiting.keep_waiting(["b"], paused=False)
    clock[0] += 2
    assert not waiting.keep_waiting(["b"], paused=False)
    assert waiting.told() == {"stragglers/seconds": 20.0, "stragglers/given_up": 1}
    assert waiting.told() == {"stragglers/seconds": 0.0, "stragglers/given_up": 0}
    assert waiting.given_up({"b": 3}) == {"b"}


def test_who_comes_in_time_is_not_given_up(clock):
    waiting = Stragglers(10.0)
    waiting.given_up({"a": 3})
    assert waiting.keep_waiting(["a"], paused=False)
    clock[0] += 4
    assert not waiting.keep_waiting([], paused=False)
    assert waiting.told() == {"stragglers/seconds": 4.0, "stragglers/given_up": 0}
    assert waiting.given_up({"a": 3}) == set()


def test_begun_anew_it_is_awaited_like_any_other(clock):
    waiting = Stragglers(10.0)
    waiting.given_up({"a": 3})
    waiting.keep_waiting(["a"], paused=False)
    clock[0] += 11
    assert not waiting.keep_waiting(["a"], paused=False)
    assert waiting.given_up({"a": 3, "b": 4}) == {"a"}
    assert waiting.given_up({"a": 4}) == set()
    assert waiting.given_up({"a": 3}) == set()


def test_while_the_run_is_paused_time_does_not_count(clock):
    waiting = Stragglers(10.0)
    waiting.given_up({"a": 3})
    for _ in range(5):
        assert waiting.keep_waiting(["a"], paused=True)
        clock[0] += 9
    assert waiting.keep_waiting(["a"], paused=False)
