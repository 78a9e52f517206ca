"""What a worker says while it has nothing to do."""

import pytest
from structlog.testing import capture_logs

from stream.connection.run_connection import MAX_BLOCK_S
from stream.queue.stage import Claim
from workers.runtime.idle_log import IdleLogger

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


def test_short_waits_are_not_worth_a_word():
    with capture_logs() as lines:
        lull = IdleLogger("groups")
        for _ in range(10):
            lull.add_wait(MAX_BLOCK_S * 0.9, NOTHING)
            lull.end_wait()
    assert lines == []


@pytest.mark.parametrize("waits", [[MAX_BLOCK_S], [MAX_BLOCK_S / 3] * 4])
def test_a_long_one_is_said_once_with_what_is_known_and_so_is_its_end(waits):
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


def test_after_its_end_a_lull_begins_anew():
    with capture_logs() as lines:
        lull = IdleLogger("groups")
        for _ in range(2):
            lull.add_wait(MAX_BLOCK_S, NOTHING)
            lull.end_wait()
    assert [line["event"] for line in lines] == ["work.waiting", "work.available"] * 2
