"""Writes that find no room wait for it, leave nothing half done, and say what they wait for. The disks are real."""

import errno
import json
import threading
import time
from contextlib import suppress

import pytest
import structlog

from stream import disk_space, private_server
from stream.disk_space import disk_problem, persist, waiting
from stream.durable import append_all, write_file_atomically
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import LedgerRecord, Trained, read_contents
from workers.train.metrics_log import MetricsLog


def fill(folder):
    """Write until there is no room."""
    with (folder / "ballast").open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def in_thread(write):
    """Start a write in a thread, as a role does; returns the thread and what it raised."""
    raised = []

    def run():
        try:
            write()
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def fresh_waits():
    disk_space.allow_waits()
    yield
    disk_space.end_waits()


def test_a_write_waits_for_room_and_says_for_which_file(tiny_disk):
    log = MetricsLog(tiny_disk / "metrics.jsonl", 0)
    log.append({"step": 1})
    fill(tiny_disk)
    with structlog.testing.capture_logs() as events:
        thread, raised = in_thread(lambda: log.append({"step": 2, "text": "x" * 8000}))
        wait_until(waiting)
        (problem,) = waiting()
        assert (
            str(problem)
            == f"the disk of {tiny_disk}/metrics.jsonl cannot be written: No space left on device, 0 KiB are free"
        )
        assert (tiny_disk / "metrics.jsonl").read_text() == '{"step":1}\n', "nothing of the line was left"
        (tiny_disk / "ballast").unlink()
        thread.join(20)
    assert raised == []
    assert [json.loads(line)["step"] for line in (tiny_disk / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert waiting() == []
    assert [event["event"] for event in events] == ["disk.waiting", "disk.recovered"]


def test_a_ledger_that_waited_has_each_record_once(tiny_disk):
    ledger = Ledger(tiny_disk / "ledger.jsonl")
    fill(tiny_disk)
    records = [LedgerRecord(f"p{i:04}", Trained(), 1, 0, "h" * 24) for i in range(200)]
    thread, raised = in_thread(lambda: ledger.append(records))
    wait_until(waiting)
    assert ledger.outcomes == {}
    assert ledger.length == 0
    (tiny_disk / "ballast").unlink()
    thread.join(20)
    assert raised == []
    length = ledger.sync()
    ledger.close()
    assert list(read_contents(tiny_disk / "ledger.jsonl", length).outcomes) == [record.prompt for record in records]
    again = Ledger(tiny_disk / "ledger.jsonl", length, digest=ledger.digest())
    assert len(again.outcomes) == 200
    again.close()


def test_a_process_that_is_to_end_waits_no_more(tiny_disk):
    fill(tiny_disk)
    log = MetricsLog(tiny_disk / "metrics.jsonl", 0)
    thread, raised = in_thread(lambda: log.append({"text": "x" * 8000}))
    wait_until(waiting)
    disk_space.end_waits()
    thread.join(5)
    assert [error.errno for error in raised] == [errno.ENOSPC]
    assert waiting() == []


def test_other_errors_are_raised_at_once(tmp_path):
    def fail():
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        persist(tmp_path, fail)


def test_a_file_appears_complete_or_stays_as_it_was(tiny_disk):
    write_file_atomically(tiny_disk / "status.json", b"old")
    fill(tiny_disk)
    with pytest.raises(OSError, match="No space left"):
        write_file_atomically(tiny_disk / "status.json", b"x" * 8000)
    assert (tiny_disk / "status.json").read_bytes() == b"old"
    assert sorted(path.name for path in tiny_disk.iterdir()) == ["ballast", "status.json"]


def test_an_append_that_fails_is_cut_off_again(tiny_disk):
    with (tiny_disk / "log").open("ab", buffering=0) as file:
        append_all(file, b"first\n")
        fill(tiny_disk)
        with pytest.raises(OSError, match="No space left"):
            append_all(file, b"second", b"x" * 8000)
        (tiny_disk / "ballast").unlink()
        append_all(file, b"third\n")
    assert (tiny_disk / "log").read_bytes() == b"first\nthird\n"


def test_a_disk_without_room_is_seen_by_everybody(tiny_disk, tmp_path):
    problem = disk_problem(tiny_disk / "of" / "a" / "folder" / "to" / "come")
    assert problem is not None
    assert problem.free_bytes == 64 * 1024
    assert disk_problem(tmp_path) is None


def test_digests_on_a_full_disk_are_missing_and_end_nothing(tiny_disk):
    (tiny_disk / "appendonlydir").mkdir()
    for number in range(40):
        (tiny_disk / "appendonlydir" / f"a.{number}.incr.aof").write_bytes(b"")
    fill(tiny_disk)
    with structlog.testing.capture_logs() as events:
        private_server.write_digests(tiny_disk)
    assert [event["event"] for event in events] == ["private_server.digests_not_written"]
    assert not (tiny_disk / private_server.DIGESTS).exists()
