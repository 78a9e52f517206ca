"""Copies of a run in object storage: always restorable, never in the way of a step."""

import shutil
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
import structlog

from stream.connection.run_identity import RunIdentity, write_identity
from stream.errors import RunMismatchError, SettingsError, StorageError
from stream.trainer.folder_lock import RunFolderLock, last_token
from stream.waiting import Backoff
from workers.runs.warnings import read_warnings
from workers.settings.toml_file import parse_settings
from workers.train.checkpointing import object_store
from workers.train.checkpointing.object_store import (
    POINTER,
    RESTORED,
    STAGING,
    Bucket,
    SavedCheckpoint,
    Uploader,
    find_copy,
    restore,
)

pytest.importorskip("obstore")

TOKEN = 1_795_423_141_293_123
"""A trainer's fencing token, a time in microseconds."""
LINE = b'{"prompt": "p"}\n'


class Run:
    """A run's folder whose trainer makes checkpoints, and its storage."""

    def __init__(self, folder: Path, token: int = TOKEN, identity: str = "a" * 32, url: str = "") -> None:
        self.folder = folder / "run"
        self.url = url or f"file://{folder}/storage"
        write_identity(self.folder, RunIdentity(id=identity))
        self.lock = RunFolderLock.acquire(self.folder, token)
        (self.folder / "groups").mkdir(exist_ok=True)

    @property
    def settings(self):
        run = {"name": "test", "folder": str(self.folder)}
        table = {"run": run, "model": {"path": "m"}, "environments": {"c": "calculator"}, "storage": {"url": self.url}}
        return parse_settings(table)

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.settings)

    def uploader(self, bucket: Bucket | None = None) -> Uploader:
        return Uploader(bucket or self.bucket, self.settings, self.lock)

    def checkpoint(self, step: int) -> SavedCheckpoint:
        """Train a step and save a checkpoint; more groups follow it in ledger and archive."""
        checkpoint = self.folder / "checkpoints" / f"step-{step:06d}"
        (checkpoint / "model").mkdir(parents=True)
        (checkpoint / "model" / "model.safetensors").write_bytes(b"weights of %d" % step * 9)
        (checkpoint / "checkpoint.json").write_bytes(b"{%d}" % step)
        with (self.folder / "groups" / "000001.groups").open("ab") as archive:
            archive.write(b"group %d" % step)
        (self.folder / "groups" / f"{step + 1:06d}.groups").write_bytes(b"segment %d" % step)
        lengths = []
        for name in ("ledger.jsonl", "metrics.jsonl"):
            with (self.folder / name).open("ab") as file:
                file.write(LINE)
                lengths.append(file.tell())
                file.write(LINE)
        return SavedCheckpoint(checkpoint, step, *lengths)

    def upload(self, *checkpoints: SavedCheckpoint, bucket: Bucket | None = None) -> None:
        its = self.uploader(bucket)
        for each in checkpoints:
            its.request(each)
            wait_until(lambda: not its.in_use)
        its.close(5)

    def lose(self) -> None:
        shutil.rmtree(self.folder)

    def restore(self) -> None:
        """Do what `penstock run` does."""
        if (copy := find_copy(self.settings)) is not None:
            restore(copy, self.settings)

    def restored_step(self) -> int:
        """Assert that the folder is one consistent state, and return its step."""
        (checkpoint,) = (self.folder / "checkpoints").iterdir()
        step = int(checkpoint.name.removeprefix("step-"))
        assert (checkpoint / "model" / "model.safetensors").read_bytes() == b"weights of %d" % step * 9
        assert (checkpoint / "checkpoint.json").read_bytes() == b"{%d}" % step
        ledger = (self.folder / "ledger.jsonl").read_bytes()
        assert ledger == (self.folder / "metrics.jsonl").read_bytes() == LINE * (2 * step - 1)
        assert b"group %d" % step in (self.folder / "groups" / "000001.groups").read_bytes()
        assert not (self.folder / STAGING).exists()
        return step


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(object_store, "_PIECE_BYTES", 100)
    monkeypatch.setattr(object_store, "_BACKOFF", Backoff(0.001, 0.002))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def warned(run: Run) -> list[str]:
    return [warning.text for warning in read_warnings(run.folder, 0)[0]]


def test_a_lost_folder_comes_back_as_of_the_last_checkpoint(run):
    run.upload(*map(run.checkpoint, (1, 2, 3)))
    before = run.bucket.read_pointer()
    run.lose()
    run.restore()
    assert run.restored_step() == 3
    assert last_token(run.folder) == TOKEN  # the next trainer gets a larger one
    assert msgspec.json.decode((run.folder / RESTORED).read_bytes()) == {"url": f"{run.url}/test", "step": 3}
    assert find_copy(run.settings) is None

    # The next trainer uploads only what is new, and what is not needed any more goes.
    run.lock = RunFolderLock.acquire(run.folder, TOKEN + 1)
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (run.folder / name).write_bytes(LINE * 6)
    written = []

    class Watched(Bucket):
        def put(self, key, content):
            written.append(key)
            super().put(key, content)

    run.upload(run.checkpoint(4), bucket=Watched(run.settings))
    after = run.bucket.read_pointer()
    assert after.files["groups/000002.groups"] == before.files["groups/000002.groups"]
    assert not {piece.key for pieces in before.files.values() for piece in pieces} & set(written)
    assert written[-1] == POINTER
    named = {piece.key for pieces in after.files.values() for piece in pieces}
    assert set(run.bucket.list_sizes("")) == {POINTER, *named}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whenever_the_trainer_is_killed_storage_holds_a_whole_state(run, tmp_path):
    """Every request of the third upload is the last one of its trainer, in turn."""

    class Dying(Bucket):
        left = 0

        def _call(self, verb, key, call):
            if self.left == 0 and verb in {"write", "delete"}:
                raise SystemExit
            self.left -= verb in {"write", "delete"}
            return super()._call(verb, key, call)

    steps = set()
    run.upload(run.checkpoint(1), run.checkpoint(2))
    third = run.checkpoint(3)
    for requests in range(30):
        shutil.copytree(tmp_path / "storage", tmp_path / "at_two", dirs_exist_ok=True)
        bucket = Dying(run.settings)
        bucket.left = requests
        its = run.uploader(bucket)
        its.request(third)
        wait_until(lambda its=its: not its.in_use)
        copy = Run(tmp_path / str(requests), url=run.url)
        copy.lose()
        copy.restore()
        steps.add(copy.restored_step())
        if its._thread.is_alive():
            its.close(1)
            break
        shutil.rmtree(tmp_path / "storage")
        (tmp_path / "at_two").rename(tmp_path / "storage")
    assert steps == {2, 3}
    assert requests > 6


def test_storage_that_is_down_delays_nothing_and_gets_the_newest_checkpoint_later(run, monkeypatch):
    monkeypatch.setattr(object_store, "_ATTEMPTS", 1_000_000)
    is_down, seen = threading.Event(), []

    class Unreachable(Bucket):
        def put(self, key, content):
            seen.append(key)
            if is_down.is_set():
                raise StorageError("no answer")
            super().put(key, content)

    is_down.set()
    with structlog.testing.capture_logs() as logs:
        its = run.uploader(Unreachable(run.settings))
        began = time.monotonic()
        first, second, third = map(run.checkpoint, (1, 2, 3))
        its.request(first)
        wait_until(lambda: len(seen) > 3)
        its.request(second)
        its.request(third)
        assert time.monotonic() - began < 5
        wait_until(lambda: its.in_use == {third.folder})
        is_down.clear()
        its.close(5)
    assert {each["event"] for each in logs} == {"storage.failed", "storage.saved"}
    assert logs[-1]["event"] == "storage.saved"
    assert run.bucket.read_pointer().step == 3


def test_a_checkpoint_that_cannot_be_copied_is_given_up_with_a_warning_and_the_next_is_tried(run):
    class Broken(Bucket):
        is_broken = True

        def put(self, key, content):
            if self.is_broken:
                raise MemoryError("no memory")
            super().put(key, content)

    bucket = Broken(run.settings)
    its = run.uploader(bucket)
    its.request(run.checkpoint(1))
    wait_until(lambda: not its.in_use)
    [warning] = warned(run)
    assert (
        warning == f"the checkpoint of step 1 is not in {run.url}/test: no memory. The next checkpoint is tried again"
    )
    bucket.is_broken = False
    its.request(run.checkpoint(2))
    its.close(5)
    assert run.bucket.read_pointer().step == 2


def test_the_end_of_a_trainer_waits_only_so_long(run):
    is_over = threading.Event()

    class Slow(Bucket):
        def put(self, key, content):
            is_over.wait(10)

    its = run.uploader(Slow(run.settings))
    its.request(run.checkpoint(1))
    its.close(0.1)
    is_over.set()
    assert "the trainer has ended, and its next start copies it" in warned(run)[0]


@pytest.mark.parametrize(
    ("token", "identity", "words"), [(TOKEN, "b" * 32, "another run"), (TOKEN - 1, "a" * 32, "later trainer")]
)
def test_storage_of_another_run_or_of_a_later_trainer_is_left_alone(run, tmp_path, token, identity, words):
    run.upload(run.checkpoint(1))
    before = run.bucket.list_sizes("")
    other = Run(tmp_path / "other", token, identity, run.url)
    with structlog.testing.capture_logs() as logs:
        other.upload(other.checkpoint(5))
    assert [each["event"] for each in logs] == ["storage.stopped"]
    assert words in logs[0]["why"]
    assert run.bucket.list_sizes("") == before


def test_two_new_runs_of_one_name_leave_each_others_pieces_whole(run, tmp_path):
    """Both begin before either has a pointer; the first to see that of the other stops."""
    other = Run(tmp_path / "other", identity="b" * 32, url=run.url)
    together = threading.Barrier(2)

    class Meeting(Bucket):
        has_met = False

        def put(self, key, content):
            if not self.has_met:
                self.has_met = True
                together.wait(5)
            super().put(key, content)

    with structlog.testing.capture_logs() as logs:
        uploaders = [each.uploader(Meeting(each.settings)) for each in (run, other)]
        for step in (1, 2):
            for its, each in zip(uploaders, (run, other), strict=True):
                its.request(each.checkpoint(step))
            for its in uploaders:
                wait_until(lambda its=its: not its.in_use)
        for its in uploaders:
            its.close(5)
    assert {each["event"] for each in logs} == {"storage.saved", "storage.stopped"}
    objects = run.bucket.list_sizes("objects")
    assert all(piece.key in objects for pieces in run.bucket.read_pointer().files.values() for piece in pieces)


def test_an_altered_piece_is_refused_and_the_run_does_not_begin_anew(run):
    run.upload(run.checkpoint(1))
    run.lose()
    key = run.bucket.read_pointer().files["ledger.jsonl"][0].key
    content = run.bucket.get(key)
    run.bucket.put(key, b"x" + content[1:])
    for _ in range(2):
        with pytest.raises(StorageError, match=rf"{run.url}/test/{key} was altered.*put the object back"):
            run.restore()
        assert not (run.folder / "checkpoints").exists()
    run.bucket.put(key, content)
    run.restore()
    assert run.restored_step() == 1


@pytest.mark.parametrize("damaged", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_damaged_pointer_is_named_with_its_remedy_and_nothing_is_overwritten(run, damaged):
    run.upload(run.checkpoint(1))
    run.bucket.put(POINTER, damaged)
    run.upload(run.checkpoint(2))
    assert run.bucket.get(POINTER) == damaged
    assert "latest.json is damaged" in warned(run)[0]
    run.lose()
    with pytest.raises(StorageError, match=r"test/latest\.json is damaged .*Replace it with an earlier version of it"):
        run.restore()


@pytest.mark.parametrize("is_new", [False, True], ids=["same trainer", "next trainer"])
@pytest.mark.parametrize("lost", ["objects", ""])
def test_what_disappears_from_storage_is_copied_again(run, is_new, lost):
    its = run.uploader()
    its.request(run.checkpoint(1))
    wait_until(lambda: not its.in_use)
    for key in run.bucket.list_sizes(lost):
        run.bucket.delete(key)
    if is_new:
        its.close(5)
        run.lock = RunFolderLock.acquire(run.folder, TOKEN + 1)
        its = run.uploader()
    its.request(run.checkpoint(2))
    its.close(5)
    run.lose()
    run.restore()
    assert (run.folder / "groups" / "000001.groups").read_bytes() == b"group 1group 2"


def test_what_strangers_put_beside_the_copy_stays(run):
    strange = ["latest.txt", "objects/readme.txt", "objects/00000001/deep/er"]
    for key in strange:
        run.bucket.put(key, b"hello")
    run.upload(run.checkpoint(1), run.checkpoint(2))
    run.lose()
    run.restore()
    assert run.restored_step() == 2
    assert set(strange) < run.bucket.list_sizes("").keys()


def test_a_folder_that_holds_a_run_is_not_touched(run):
    run.upload(run.checkpoint(1))
    shutil.rmtree(run.folder / "checkpoints")
    assert find_copy(run.settings) is None  # it has a ledger
    (run.folder / "ledger.jsonl").unlink()
    write_identity(run.folder, RunIdentity(id="b" * 32))
    with pytest.raises(RunMismatchError, match="of the same name"):
        find_copy(run.settings)


def test_an_error_of_s3_has_its_reason_which_stands_in_the_second_line(run):
    body = '<?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code><Message>It does not exist</Message></Error>'

    def refuse():
        raise OSError(f"Error performing GET http://s3: 404 Not Found: {body}\n\nDebug source: ...")

    with pytest.raises(StorageError, match=r"could not list objects: .*NoSuchBucket.*check storage\.url"):
        run.bucket._call("list", "objects", refuse)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("file:///a#b", "%23 for #"),
        ("s3://b/a?x=1", "%3F for ?"),
        ("nothing://x", "nothing"),
        ("memory:///a", "not mem"),
    ],
)
def test_a_url_whose_copy_would_be_elsewhere_is_refused_with_its_name(run, url, remedy):
    run.url = url
    with pytest.raises(SettingsError, match=r"storage\.url") as caught:
        Bucket(run.settings)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("function", ["_move", "shutil.rmtree"])
def test_a_restoration_that_was_cut_off_is_begun_again_and_the_run_does_not_begin_anew(run, monkeypatch, function):
    run.upload(run.checkpoint(1))
    run.lose()
    with monkeypatch.context() as patched:
        patched.setattr(f"workers.train.checkpointing.object_store.{function}", lambda *_: 1 / 0)  # as if killed
        with pytest.raises(ZeroDivisionError):
            run.restore()
    url = run.url
    for elsewhere in ("", f"{url}-empty"):
        run.url = elsewhere
        with pytest.raises(StorageError, match=r"was restored only in part.*Set storage.url to what it was"):
            run.restore()
    run.url = url
    run.restore()
    assert run.restored_step() == 1


def test_a_full_disk_is_named(run, monkeypatch):
    run.upload(run.checkpoint(1))
    run.lose()
    monkeypatch.setattr(object_store.os, "fsync", partial(_raise, OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match=r"could not be restored from .*No space left.*make room on that disk"):
        run.restore()


def _raise(error, *_):
    raise error
