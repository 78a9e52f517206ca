"""Log lines of a worker without work."""

import pytest
from structlog.testing import capture_logs

from stream.connection.run_connection import MAX_BLOCK_S
from stream.queue.stage import Claim
from workers.role.work_loop import IdleLogger

NOTHING = Claim(
    leases=[],
    wake_id="0-0",
    next_due_s=None,
    finish_reason="",
    unfinished_prompts=3,
    feed_done=True,
    version=2,
    paused=True,
)


def test_short_waits_are_not_logged():
    with capture_logs() as lines:
        lull = IdleLogger("groups")
        for _ in range(10):
            lull.add_wait(MAX_BLOCK_S * 0.9, NOTHING)
            lull.end_wait()
    assert lines == []


@pytest.mark.parametrize("waits", [[MAX_BLOCK_S], [MAX_BLOCK_S / 3] * 4])
def test_a_long_wait_and_its_end_are_logged_once(waits):
    with capture_logs() as lines:
        lull = IdleLogger("groups")
        for _ in range(3):
            for seconds in waits:
                lull.add_wait(seconds, NOTHING)
        lull.end_wait()
        lull.end_wait()
    awaited, came = lines
    assert awaited == {
        "event": "work.waiting",
        "log_level": "info",
        "stage": "groups",
        "unfinished_prompts": 3,
        "feed_done": True,
        "paused": True,
    }
    assert (came["event"], came["stage"]) == ("work.available", "groups")


def test_a_new_wait_starts_from_zero():
    with capture_logs() as lines:
        lull = IdleLogger("groups")
        for _ in range(2):
            lull.add_wait(MAX_BLOCK_S, NOTHING)
            lull.end_wait()
    assert [line["event"] for line in lines] == ["work.waiting", "work.available"] * 2
