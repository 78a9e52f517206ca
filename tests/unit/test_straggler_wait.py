"""Which groups a step waits for, and for how long."""

import pytest

from workers.train.groups import collector as stragglers
from workers.train.groups.collector import StragglerWait


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stragglers.time, "monotonic", lambda: now[0])
    return now


def test_waiting_ends_after_the_timeout_without_an_arrival(clock):
    waiting = StragglerWait(10.0)
    assert waiting.abandoned({"a": 3, "b": 3}) == set()
    assert waiting.should_wait(["a", "b"], halted=False)
    clock[0] += 9
    assert waiting.remaining_s == pytest.approx(1.0, abs=0.01)
    assert waiting.should_wait(["b"], halted=False)  # a has arrived
    clock[0] += 9
    assert waiting.should_wait(["b"], halted=False)
    clock[0] += 2
    assert not waiting.should_wait(["b"], halted=False)
    assert waiting.pop_metrics() == {"stragglers/seconds": 20.0, "stragglers/abandoned": 1}
    assert waiting.pop_metrics() == {"stragglers/seconds": 0.0, "stragglers/abandoned": 0}
    assert waiting.abandoned({"b": 3}) == {"b"}


def test_a_straggler_that_arrives_in_time_is_not_abandoned(clock):
    waiting = StragglerWait(10.0)
    waiting.abandoned({"a": 3})
    assert waiting.should_wait(["a"], halted=False)
    clock[0] += 4
    assert not waiting.should_wait([], halted=False)
    assert waiting.pop_metrics() == {"stragglers/seconds": 4.0, "stragglers/abandoned": 0}
    assert waiting.abandoned({"a": 3}) == set()


def test_an_abandoned_group_that_starts_again_is_waited_for(clock):
    waiting = StragglerWait(10.0)
    waiting.abandoned({"a": 3})
    waiting.should_wait(["a"], halted=False)
    clock[0] += 11
    assert not waiting.should_wait(["a"], halted=False)
    assert waiting.abandoned({"a": 3, "b": 4}) == {"a"}
    assert waiting.abandoned({"a": 4}) == set()
    assert waiting.abandoned({"a": 3}) == set()


def test_time_while_the_run_is_paused_does_not_count(clock):
    waiting = StragglerWait(10.0)
    waiting.abandoned({"a": 3})
    for _ in range(5):
        assert waiting.should_wait(["a"], halted=True)
        clock[0] += 9
    assert waiting.should_wait(["a"], halted=False)
