"""The lock on a run's folder: a replaced trainer changes no file, wherever it was suspended."""

import os
import signal
import subprocess
import sys

import pytest

from stream.errors import FencedError
from stream.trainer.folder_lock import LOCK_FILE, RunFolderLock, last_token
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import LedgerRecord, Trained, read_contents
from workers.train.metrics_log import MetricsLog

OLD, YOUNG = 1_700_000_000_000_000, 1_700_000_000_000_001


@pytest.fixture
def zombie(tmp_path):
    """The lock of a trainer that was suspended after acquiring the folder and has since been replaced."""
    fence = RunFolderLock.acquire(tmp_path, OLD)
    yield fence
    assert last_token(tmp_path) == YOUNG, "it changed nothing here either"


def line(prompt: str) -> LedgerRecord:
    return LedgerRecord(prompt, Trained(), 1, 0, "")


def test_each_trainer_takes_over_the_folder(tmp_path):
    assert last_token(tmp_path / "run") == 0
    with RunFolderLock.acquire(tmp_path / "run", OLD).hold():
        assert last_token(tmp_path / "run") == OLD
    with RunFolderLock.acquire(tmp_path / "run", YOUNG).hold():
        assert last_token(tmp_path / "run") == YOUNG


def test_a_replaced_trainer_cannot_hold_or_reacquire_the_folder(tmp_path, zombie):
    with zombie.hold():
        pass
    RunFolderLock.acquire(tmp_path, YOUNG)
    with pytest.raises(FencedError, match="another trainer has taken over the folder"), zombie.hold():
        pytest.fail("it was let in")
    with pytest.raises(FencedError, match="another trainer has taken over the folder"):
        RunFolderLock.acquire(tmp_path, OLD)


def test_a_replaced_trainer_cannot_change_the_ledger(tmp_path, zombie):
    path = tmp_path / "ledger.jsonl"
    old = Ledger(path, 0, zombie)
    old.append([line("a")])
    kept = old.sync()
    old.append([line("b")])
    heir = Ledger(path, kept, RunFolderLock.acquire(tmp_path, YOUNG))
    heir.append([line("c")])
    for act in (lambda: old.append([line("b")]), lambda: Ledger(path, 0, zombie)):
        with pytest.raises(FencedError):
            act()
    old.close()
    assert list(old.outcomes) == ["a", "b"]
    heir.append([line("d")])
    heir.close()
    assert list(read_contents(path).outcomes) == ["a", "c", "d"]


def test_a_replaced_trainer_cannot_change_the_metrics(tmp_path, zombie):
    old = MetricsLog(tmp_path / "metrics.jsonl", 0, zombie)
    old.append({"step": 1})
    heir = MetricsLog(tmp_path / "metrics.jsonl", old.size, RunFolderLock.acquire(tmp_path, YOUNG))
    heir.append({"step": 2})
    for act in (lambda: old.append({"step": 3}), old.cut):
        with pytest.raises(FencedError):
            act()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":1}\n{"step":2}\n'


@pytest.fixture
def in_a_write(tmp_path):
    """A process that holds the folder's lock in the middle of a change."""
    code = (
        "import sys, time; from pathlib import Path; from stream.trainer.folder_lock import RunFolderLock\n"
        f"with RunFolderLock.acquire(Path(sys.argv[1]), {OLD}).hold():\n"
        "    print('in it', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in it\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_acquiring_waits_for_a_trainer_suspended_in_a_write(tmp_path, in_a_write):
    os.kill(in_a_write.pid, signal.SIGSTOP)
    with pytest.raises(FencedError, match=rf"locked for 0.2 s: .* process {in_a_write.pid} on .*; end it"):
        RunFolderLock.acquire(tmp_path, YOUNG, timeout_s=0.2)
    assert last_token(tmp_path) == OLD


def test_the_lock_of_a_dead_process_is_released(tmp_path, in_a_write):
    os.kill(in_a_write.pid, signal.SIGSTOP)
    os.kill(in_a_write.pid, signal.SIGKILL)
    in_a_write.wait()
    with RunFolderLock.acquire(tmp_path, YOUNG, timeout_s=0.2).hold():
        pass


@pytest.mark.parametrize("content", [b"", b"\0" * 120, b"17x host 3\n", b"\xff\xfe"])
def test_a_lock_file_with_lost_content_has_token_0(tmp_path, content):
    (tmp_path / LOCK_FILE).write_bytes(content)
    assert last_token(tmp_path) == 0
    with RunFolderLock.acquire(tmp_path, OLD).hold():
        assert last_token(tmp_path) == OLD


def test_a_file_system_without_locks_still_has_the_token(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    old = RunFolderLock.acquire(tmp_path, OLD)
    with old.hold():
        pass
    RunFolderLock.acquire(tmp_path, YOUNG)
    with pytest.raises(FencedError), old.hold():
        pytest.fail("it was let in")
