"""Copies of a run in object storage: always restorable, never in the way of a step."""

import shutil
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
import structlog

from stream.backoff import Backoff
from stream.connection.run_identity import RunIdentity, write_identity
from stream.errors import RunMismatchError, SettingsError, StorageError
from stream.trainer.folder_lock import RunFolderLock, last_token
from workers.run import restore
from workers.run.restore import restore_if_lost
from workers.settings.toml_file import parse_settings
from workers.storage import download, uploader
from workers.storage.bucket import Bucket
from workers.storage.download import RESTORED, STAGING, download_snapshot
from workers.storage.snapshot import OBJECTS, SNAPSHOTS, newest_snapshot, read_snapshot
from workers.storage.uploader import SavedCheckpoint, SnapshotUploader

pytest.importorskip("obstore")

TOKEN = 1_795_423_141_293_123
"""A trainer's fencing token, a time in microseconds."""
LINE = b'{"prompt": "p"}\n'


class Run:
    """A run's folder whose trainer makes checkpoints, and its storage."""

    def __init__(self, folder: Path, token: int = TOKEN, identity: str = "a" * 32) -> None:
        self.folder = folder / "run"
        self.url = f"file://{folder}/storage"
        self.identity = RunIdentity(id=identity)
        write_identity(self.folder, self.identity)
        self.lock = RunFolderLock.acquire(self.folder, token)
        (self.folder / "groups").mkdir(exist_ok=True)

    @property
    def bucket(self) -> Bucket:
        return Bucket(f"{self.url}/test")

    def uploader(self, bucket: Bucket | None = None) -> SnapshotUploader:
        backoff = Backoff(0.001, 0.002)
        return SnapshotUploader(
            bucket or self.bucket, self.folder, "test", self.identity.id, self.lock, backoff=backoff
        )

    def checkpoint(self, step: int) -> SavedCheckpoint:
        """Train a step and save a checkpoint; more groups follow it in ledger and archive."""
        checkpoint = self.folder / "checkpoints" / f"step-{step:06d}"
        (checkpoint / "model").mkdir(parents=True)
        (checkpoint / "model" / "model.safetensors").write_bytes(b"weights of %d" % step * 9)
        (checkpoint / "checkpoint.json").write_bytes(b"{%d}" % step)
        with (self.folder / "groups" / "000001.groups").open("ab") as archive:
            archive.write(b"group %d" % step)
        (self.folder / "groups" / f"{step + 1:06d}.groups").write_bytes(b"a new segment")
        lengths = []
        for name in ("ledger.jsonl", "metrics.jsonl"):
            with (self.folder / name).open("ab") as file:
                file.write(LINE)
                lengths.append(file.tell())
                file.write(LINE)
        return SavedCheckpoint(checkpoint, step, *lengths)

    def lose(self) -> None:
        shutil.rmtree(self.folder)

    def settings(self):
        run = {"name": "test", "folder": str(self.folder)}
        table = {"run": run, "model": {"path": "m"}, "environments": {"c": "calculator"}, "storage": {"url": self.url}}
        return parse_settings(table)

    def restored_step(self) -> int:
        """Assert that the folder is one consistent state, and return its step."""
        (checkpoint,) = (self.folder / "checkpoints").iterdir()
        step = int(checkpoint.name.removeprefix("step-"))
        assert (checkpoint / "model" / "model.safetensors").read_bytes() == b"weights of %d" % step * 9
        assert (checkpoint / "checkpoint.json").read_bytes() == b"{%d}" % step
        ledger = (self.folder / "ledger.jsonl").read_bytes()
        assert ledger == (self.folder / "metrics.jsonl").read_bytes() == LINE * (2 * step - 1)
        archive = (self.folder / "groups" / "000001.groups").read_bytes()
        assert b"group %d" % step in archive
        assert not (self.folder / STAGING).exists()
        return step


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(uploader, "PART_BYTES", 100)


def upload(run: Run, *checkpoints: SavedCheckpoint, bucket: Bucket | None = None) -> None:
    its = run.uploader(bucket)
    for each in checkpoints:
        its.request(each)
        wait_until(lambda: not its.in_use)
    its.close(5)


def has_ended(its: SnapshotUploader) -> bool:
    return not its.in_use or not its._thread.is_alive()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_lost_folder_comes_back_as_of_the_last_checkpoint(run):
    upload(run, *map(run.checkpoint, (1, 2, 3)))
    before = newest_snapshot(run.bucket)
    run.lose()
    restore_if_lost(run.settings())
    assert run.restored_step() == 3
    assert last_token(run.folder) == TOKEN  # the next trainer gets a larger one
    assert msgspec.json.decode((run.folder / RESTORED).read_bytes()) == {"url": f"{run.url}/test", "step": 3}
    restore_if_lost(run.settings())
    assert newest_snapshot(run.bucket) == before

    # The next trainer uploads only what is new, and what it does not need any more goes.
    run.lock = RunFolderLock.acquire(run.folder, TOKEN + 1)
    (run.folder / "ledger.jsonl").write_bytes(LINE * 6)
    (run.folder / "metrics.jsonl").write_bytes(LINE * 6)
    upload(run, run.checkpoint(4))
    after = newest_snapshot(run.bucket)
    assert after.files["groups/000002.groups"] == before.files["groups/000002.groups"]
    assert list(run.bucket.list_sizes(OBJECTS)) == sorted(before.keys | after.keys)


def test_a_long_file_has_few_parts_and_nothing_is_left_over(run):
    upload(run, *map(run.checkpoint, range(1, 41)))
    ledger = newest_snapshot(run.bucket).files["ledger.jsonl"]
    assert sum(part.size for part in ledger) == 79 * len(LINE)
    assert len(ledger) <= 28
    assert all(part.size <= 100 for part in ledger)
    assert len(run.bucket.list_sizes(SNAPSHOTS)) == 2
    assert len(run.bucket.list_sizes(OBJECTS)) < 140


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
    upload(run, run.checkpoint(1), run.checkpoint(2))
    third = run.checkpoint(3)
    for requests in range(30):
        shutil.copytree(tmp_path / "storage", tmp_path / "at_two", dirs_exist_ok=True)
        bucket = Dying(f"{run.url}/test")
        bucket.left = requests
        its = run.uploader(bucket)
        its.request(third)
        wait_until(partial(has_ended, its))
        copy = Run(tmp_path / str(requests))
        copy.lose()
        download_snapshot(run.bucket, newest_snapshot(run.bucket), copy.folder)
        shutil.rmtree(copy.folder / STAGING)
        steps.add(copy.restored_step())
        if its._thread.is_alive():
            its.close(1)
            break
        shutil.rmtree(tmp_path / "storage")
        (tmp_path / "at_two").rename(tmp_path / "storage")
    assert steps == {2, 3}
    assert requests > 6


def test_storage_that_is_down_delays_nothing_and_gets_the_newest_checkpoint_later(run):
    is_down, seen = threading.Event(), []

    class Unreachable(Bucket):
        def put(self, key, content):
            seen.append(key)
            if is_down.is_set():
                raise StorageError("no answer")
            super().put(key, content)

    is_down.set()
    with structlog.testing.capture_logs() as logs:
        its = run.uploader(Unreachable(f"{run.url}/test"))
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
    assert [each["event"] for each in logs] == ["storage.failed", "storage.saved", "storage.recovered"]
    assert newest_snapshot(run.bucket).step == 3


def test_the_end_of_a_trainer_waits_only_so_long(run):
    class Broken(Bucket):
        def put(self, key, content):
            raise StorageError("no answer")

    with structlog.testing.capture_logs() as logs:
        its = run.uploader(Broken(f"{run.url}/test"))
        its.request(run.checkpoint(1))
        its.close(0.2)
    assert logs[-1]["event"] == "storage.incomplete"
    assert logs[-1]["step"] == 1


@pytest.mark.parametrize(
    ("token", "identity", "words"), [(TOKEN, "b" * 32, "another run"), (TOKEN - 1, "a" * 32, "later trainer")]
)
def test_storage_of_another_run_or_of_a_later_trainer_is_left_alone(run, tmp_path, token, identity, words):
    upload(run, run.checkpoint(1))
    before = run.bucket.list_sizes("")
    other = Run(tmp_path / "other", token, identity)
    with structlog.testing.capture_logs() as logs:
        upload(other, other.checkpoint(5), bucket=run.bucket)
    assert [each["event"] for each in logs] == ["storage.stopped"]
    assert words in logs[0]["why"]
    assert run.bucket.list_sizes("") == before


def test_an_altered_object_is_refused_and_the_run_does_not_begin_anew(run, tmp_path):
    upload(run, run.checkpoint(1))
    run.lose()
    part = newest_snapshot(run.bucket).files["ledger.jsonl"][0]
    content = run.bucket.get(part.key)
    run.bucket.put(part.key, b"x" + content[1:])
    for _ in range(2):
        with pytest.raises(StorageError, match="was altered"):
            restore_if_lost(run.settings())
        assert not (run.folder / "checkpoints").exists()
    run.bucket.put(part.key, content)
    restore_if_lost(run.settings())
    assert run.restored_step() == 1


def test_a_checkpoint_that_is_damaged_in_storage_gives_way_to_the_one_before(run):
    upload(run, run.checkpoint(1), run.checkpoint(2))
    run.lose()
    part = newest_snapshot(run.bucket).files["checkpoints/step-000002/checkpoint.json"][0]
    run.bucket.put(part.key, b"x" * part.size)
    restored = restore_if_lost(run.settings())
    assert (restored.step, run.restored_step()) == (1, 1)
    assert "was altered" in restored.problem


DAMAGES = {
    "bits": lambda content: content[:40] + b"!" + content[41:],
    "no UTF-8": lambda content: content.replace(b"groups", b"gro\xffps"),
    "cut": lambda content: content[:50],
    "empty": lambda content: b"",
    "deep": lambda content: b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("whole", [0, 1])
def test_a_damaged_snapshot_hides_neither_the_one_before_nor_the_next(run, damage, whole):
    upload(run, *map(run.checkpoint, range(1, whole + 2)))
    newest = list(run.bucket.list_sizes(SNAPSHOTS))[-1]
    run.bucket.put(newest, damage(run.bucket.get(newest)))
    if whole:
        assert newest_snapshot(run.bucket).step == 1
    else:
        with pytest.raises(StorageError, match="none of 1 snapshots can be read"):
            newest_snapshot(run.bucket)
    run.lock = RunFolderLock.acquire(run.folder, TOKEN + 1)
    upload(run, run.checkpoint(whole + 2))
    assert newest not in run.bucket.list_sizes(SNAPSHOTS)
    run.lose()
    restore_if_lost(run.settings())
    assert len(list((run.folder / "checkpoints").iterdir())) == 1
    assert newest_snapshot(run.bucket).step == whole + 2


@pytest.mark.parametrize("keys", [slice(None), slice(0, 1)], ids=["all", "one"])
@pytest.mark.parametrize("is_new", [False, True], ids=["same trainer", "next trainer"])
def test_what_disappears_from_storage_is_copied_again(run, keys, is_new):
    its = run.uploader()
    its.request(run.checkpoint(1))
    wait_until(lambda: not its.in_use)
    files = newest_snapshot(run.bucket).files
    archive = files["groups/000001.groups"][0].key
    lost = [archive, *run.bucket.list_sizes("")]
    run.bucket.delete(lost[keys])
    if is_new:
        its.close(5)
        run.lock = RunFolderLock.acquire(run.folder, TOKEN + 1)
        its = run.uploader()
    its.request(run.checkpoint(2))
    its.close(5)
    run.lose()
    restore_if_lost(run.settings())
    assert (run.folder / "groups" / "000001.groups").read_bytes() == b"group 1group 2"


def test_what_strangers_put_beside_the_copies_stays_and_does_no_harm(run):
    strange = ["snapshots/readme.txt", "snapshots/zz/deep.json", "objects/readme.txt", "objects/00000001/deep/er"]
    for key in strange:
        run.bucket.put(key, b"hello")
    upload(run, run.checkpoint(1), run.checkpoint(2))
    run.lose()
    assert restore_if_lost(run.settings()).step == 2
    assert set(strange) < run.bucket.list_sizes("").keys()


def test_two_new_runs_of_one_name_leave_each_others_copies_whole(run, tmp_path):
    """Both begin before either has a snapshot."""
    other = Run(tmp_path / "other", identity="b" * 32)
    together = threading.Barrier(2)

    class Meeting(Bucket):
        has_met = False

        def put(self, key, content):
            if not self.has_met:
                self.has_met = True
                together.wait(5)
            super().put(key, content)

    with structlog.testing.capture_logs() as logs:
        uploaders = [each.uploader(Meeting(f"{run.url}/test")) for each in (run, other)]
        for its, each in zip(uploaders, (run, other), strict=True):
            its.request(each.checkpoint(1))
        for its in uploaders:
            wait_until(partial(has_ended, its))
        for its, each in zip(uploaders, (run, other), strict=True):
            its.request(each.checkpoint(2))
            its.close(5)
    assert {each["event"] for each in logs} <= {"storage.saved", "storage.stopped"}
    assert "another run named 'test'" in next(each["why"] for each in logs if each["event"] == "storage.stopped")
    objects = run.bucket.list_sizes(OBJECTS)
    snapshots = [read_snapshot(run.bucket, key) for key in run.bucket.list_sizes(SNAPSHOTS)]
    assert snapshots
    assert all(each.keys <= objects.keys() for each in snapshots)


def test_an_error_that_nobody_expected_is_reported_and_copying_goes_on(run):
    class Surprising(Bucket):
        has_failed = False

        def put(self, key, content):
            if not self.has_failed:
                self.has_failed = True
                raise MemoryError("no memory")
            super().put(key, content)

    with structlog.testing.capture_logs() as logs:
        upload(run, run.checkpoint(1), bucket=Surprising(f"{run.url}/test"))
    assert [each["event"] for each in logs] == ["storage.failed", "storage.saved", "storage.recovered"]
    assert "no memory" in logs[0]["error"]


def test_a_folder_that_holds_a_run_is_not_touched(run, tmp_path):
    upload(run, run.checkpoint(1))
    shutil.rmtree(run.folder / "checkpoints")
    restore_if_lost(run.settings())  # it has a ledger
    assert not (run.folder / "checkpoints").exists()
    (run.folder / "ledger.jsonl").unlink()
    write_identity(run.folder, RunIdentity(id="b" * 32))
    with pytest.raises(RunMismatchError, match="of the same name"):
        restore_if_lost(run.settings())
    assert not (run.folder / "checkpoints").exists()


def test_an_error_of_s3_has_its_reason_which_stands_in_the_second_line(run):
    body = '<?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code><Message>It does not exist</Message></Error>'

    def refuse():
        raise OSError(f"Error performing GET http://s3: 404 Not Found: {body}\n\nDebug source: ...")

    with pytest.raises(StorageError, match=r"404 Not Found: NoSuchBucket: It does not exist; check storage\.url"):
        run.bucket._call("list", "snapshots", refuse)


def test_a_url_that_cannot_be_is_refused_with_its_name():
    with pytest.raises(SettingsError, match=r"storage\.url = 'nothing://x'"):
        Bucket("nothing://x")
    with pytest.raises(SettingsError, match=r"storage\.url"):
        parse_settings({"model": {"path": "m"}, "environments": {"c": "calculator"}, "storage": {"url": "/a/folder"}})


def test_a_restoration_that_was_interrupted_may_go_on_with_another_snapshot(run, monkeypatch):
    upload(run, run.checkpoint(1), run.checkpoint(2))
    run.lose()
    monkeypatch.setattr(restore.shutil, "rmtree", lambda _: 1 / 0)  # as if killed at the very end
    with pytest.raises(ZeroDivisionError):
        restore_if_lost(run.settings())
    monkeypatch.undo()
    monkeypatch.setattr(uploader, "PART_BYTES", 100)
    assert (run.folder / "checkpoints" / "step-000002").exists()
    part = newest_snapshot(run.bucket).files["checkpoints/step-000002/checkpoint.json"][0]
    run.bucket.delete([part.key])
    assert restore_if_lost(run.settings()).step == 1
    assert run.restored_step() == 1


@pytest.mark.parametrize(
    ("url", "remedy"),
    [("file:///a#b", "%23"), ("s3://bucket/a?region=x", "%3F"), ("memory:///a", "lost with the trainer")],
)
def test_a_url_whose_copy_would_be_elsewhere_is_refused(url, remedy):
    with pytest.raises(SettingsError, match=r"storage\.url") as caught:
        Bucket(url)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("storage", ["", "empty"])
def test_a_folder_that_was_restored_in_part_does_not_begin_anew(run, monkeypatch, tmp_path, storage):
    upload(run, run.checkpoint(1))
    run.lose()
    with monkeypatch.context() as patched:
        patched.setattr(download, "_move", lambda *_: 1 / 0)  # as if killed
        with pytest.raises(ZeroDivisionError):
            restore_if_lost(run.settings())
    settings, run.url = run.settings(), storage and f"file://{tmp_path}/{storage}"
    with pytest.raises(StorageError, match=r"was restored in part.*set storage\.url as it was"):
        restore_if_lost(run.settings())
    restore_if_lost(settings)
    assert run.restored_step() == 1
    assert restore_if_lost(run.settings()) is None
