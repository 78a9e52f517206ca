"""Checkpoints are complete or absent, verified, and never loaded if damaged; export of weights."""

import errno
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from stream import durable
from stream.durable import create_folder_atomically
from stream.errors import FencedError, RunFailedError, RunMismatchError
from stream.trainer.folder_lock import RunFolderLock
from tests.cases.groups import completion, group
from tests.cases.models import loaded_once, write_small_qwen3
from workers import settings
from workers.runs.progress import Progress
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.checkpointing.export import export
from workers.train.step.batch import collate
from workers.train.step.learner import Learner

pytestmark = pytest.mark.models


def write_model(folder, hidden=16):
    write_small_qwen3(folder, 16, layers=1, tied=True, hidden=hidden)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(16)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with loaded_once():
        yield write_model(tmp_path_factory.mktemp("base"))


def make_learner(base, dtype="float32"):
    return Learner(
        settings.Settings(
            model=settings.ModelSettings(path=str(base), dtype=dtype),
            data=settings.DataSettings(path="none"),
            train=settings.TrainSettings(learning_rate=1e-2),
        )
    )


def batch():
    return collate([group(completion(0, 1.0, [3, 4], logprobs=(-2.0,)), completion(1, 0.0, [5, 6], logprobs=(-2.0,)))])


def weights(learner):
    return torch.cat([p.detach().flatten().clone() for p in learner.parameters.values()])


def saved(checkpoints, learner, *steps, rewards=None):
    for place, step in enumerate(steps):
        reward = rewards[place] if rewards else None
        checkpoints.save(step, learner, Progress(step=step, version=step, mean_reward=reward))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_learner_continues_exactly(base, tmp_path, dtype):
    through, checkpoints = make_learner(base, dtype), CheckpointStore(tmp_path)
    through.step(batch(), 0)
    through.step(batch(), 0)
    checkpoints.save(2, through, Progress(step=2, version=4, ledger_bytes=123, completion_states={"valid": 4}))
    through.step(batch(), 0)
    back = make_learner(base, dtype)
    checkpoint = checkpoints.latest()
    checkpoint.restore(back)
    assert back.steps == 2
    assert not torch.equal(weights(back), weights(through))
    back.step(batch(), 0)
    assert torch.equal(weights(back), weights(through))
    assert checkpoint.progress == Progress(step=2, version=4, ledger_bytes=123, completion_states={"valid": 4})


def test_a_learner_that_never_stepped_can_be_saved_and_restored(base, tmp_path):
    CheckpointStore(tmp_path).save(0, make_learner(base), Progress())
    again = make_learner(base)
    CheckpointStore(tmp_path).latest().restore(again)
    assert torch.equal(weights(again), weights(make_learner(base)))
    again.step(batch(), 0)
    CheckpointStore(tmp_path).latest().restore(again)
    assert again.state() == {}
    assert again.steps == 0


def test_a_checkpoint_of_another_model_is_refused(base, tmp_path):
    saved(CheckpointStore(tmp_path / "run"), make_learner(base), 1)
    other = make_learner(write_model(tmp_path / "other", hidden=32))
    with pytest.raises(RunMismatchError, match="not those of"):
        CheckpointStore(tmp_path / "run").latest().restore(other)


def test_a_run_without_checkpoints_has_none(tmp_path):
    checkpoints = CheckpointStore(tmp_path / "none")
    assert checkpoints.is_empty
    assert checkpoints.latest() is checkpoints.best() is checkpoints.at_step(3) is None


def test_a_checkpoint_that_lacks_a_byte_does_not_count(base, tmp_path):
    saved(CheckpointStore(tmp_path), make_learner(base), 1)
    assert not CheckpointStore(tmp_path).is_empty
    cut(tmp_path / "step-000001" / "optimizer.safetensors")
    assert CheckpointStore(tmp_path).is_empty


def test_the_newest_checkpoints_and_the_best_are_kept(base, tmp_path):
    checkpoints, learner = CheckpointStore(tmp_path, keep_last=2), make_learner(base)
    saved(checkpoints, learner, 10, 20, 30, 40, 50, rewards=[0.1, 0.9, 0.3, 0.2, None])
    assert names(tmp_path) == ["step-000020", "step-000040", "step-000050"]
    assert checkpoints.latest().progress.step == 50
    assert checkpoints.best().progress.step == 20
    assert checkpoints.at_step(40).progress.version == 40
    assert checkpoints.at_step(30) is None


def test_a_checkpoint_that_is_being_copied_is_kept(base, tmp_path):
    class Slow:
        def __init__(self):
            self.requested = []

        @property
        def in_use(self):
            return {each.folder for each in self.requested[:1]}

        def request(self, checkpoint):
            self.requested.append(checkpoint)

    checkpoints = CheckpointStore(tmp_path, keep_last=1)
    checkpoints.uploader = Slow()
    saved(checkpoints, make_learner(base), 1, 2, 3)
    assert names(tmp_path) == ["step-000001", "step-000003"]
    assert [each.step for each in checkpoints.uploader.requested] == [1, 2, 3]


def test_a_repeated_step_gets_a_checkpoint_of_its_own(base, tmp_path):
    checkpoints, learner = CheckpointStore(tmp_path), make_learner(base)
    saved(checkpoints, learner, 7)
    checkpoints.save(7, learner, Progress(step=7, version=99))
    assert names(tmp_path) == ["step-000007", "step-000007-2"]
    assert checkpoints.latest().progress.version == 99


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "no manifest": lambda folder: (folder / "checkpoint.json").unlink(),
    "half a manifest": lambda folder: cut(folder / "checkpoint.json"),
    "an empty manifest": lambda folder: (folder / "checkpoint.json").write_text("{}"),
    "short weights": lambda folder: cut(folder / "model" / "model.safetensors"),
    "altered weights": lambda folder: flip(folder / "model" / "model.safetensors"),
    "altered optimizer": lambda folder: flip(folder / "optimizer.safetensors"),
    "a missing file": lambda folder: (folder / "model" / "config.json").unlink(),
    "nothing in it": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_skipped_and_logged(base, tmp_path, damage):
    checkpoints = CheckpointStore(tmp_path)
    saved(checkpoints, make_learner(base), 1, 2, rewards=[0.0, 1.0])
    damage(tmp_path / "step-000002")
    with capture_logs() as logs:
        assert checkpoints.latest().progress.step == 1
    passed_over = [line for line in logs if line["event"] == "checkpoint.skipped"]
    assert [(line["log_level"], Path(line["folder"]).name) for line in passed_over] == [("error", "step-000002")]
    assert checkpoints.best().progress.step == 1
    assert checkpoints.at_step(2) is None


def test_a_half_written_checkpoint_is_ignored_and_removed(base, tmp_path):
    script = f"""
import sys
from pathlib import Path
from stream.durable import create_folder_atomically
with create_folder_atomically(Path({str(tmp_path / "step-000009")!r})) as folder:
    (folder / "checkpoint.json").write_text("half")
    print("there", flush=True)
    sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"there\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert len(names(tmp_path)) == 1
    checkpoints = CheckpointStore(tmp_path)
    assert checkpoints.is_empty
    saved(checkpoints, make_learner(base), 10)
    assert names(tmp_path) == ["step-000010"]


def test_a_kill_during_removal_leaves_no_partial_checkpoint(base, tmp_path, monkeypatch):
    checkpoints, learner = CheckpointStore(tmp_path, keep_last=1), make_learner(base)

    def killed(folder, **_):
        (folder / "model" / "model.safetensors").unlink()
        raise KeyboardInterrupt

    saved(checkpoints, learner, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            saved(checkpoints, learner, 2)
    with capture_logs() as logs:
        assert [c.progress.step for c in CheckpointStore(tmp_path).list_all()] == [2]
        saved(CheckpointStore(tmp_path, keep_last=1), learner, 3)
    assert "checkpoint.skipped" not in [line["event"] for line in logs]
    assert names(tmp_path) == ["step-000003"]


def test_a_full_disk_is_a_clear_error_and_earlier_checkpoints_remain(base, tmp_path):
    checkpoints, learner = CheckpointStore(tmp_path), make_learner(base)
    saved(checkpoints, learner, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # file size limit: the disk seems full
    try:
        with pytest.raises(RunFailedError, match=r"step-000002 could not be written.*step-000001 stands"):
            saved(checkpoints, learner, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-000001"]
    assert checkpoints.latest().progress.step == 1
    saved(checkpoints, learner, 2)
    assert checkpoints.latest().progress.step == 2


def test_a_folder_whose_block_fails_is_not_created(tmp_path):
    def make():
        with create_folder_atomically(tmp_path / "a") as folder:
            (folder / "x").write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        make()
    assert names(tmp_path) == []


def test_a_disk_that_fails_after_the_rename_is_told_by_its_own_error(tmp_path, monkeypatch):
    def fsync(path):
        if path == tmp_path:
            raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(durable, "fsync_path", fsync)
    with pytest.raises(OSError, match="the disk fails"), create_folder_atomically(tmp_path / "a") as folder:
        (folder / "x").write_text("x")


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    with create_folder_atomically(tmp_path / "deep" / "a") as folder:
        (folder / "x").write_text("x")
        assert not (tmp_path / "deep" / "a").exists()
    assert names(tmp_path / "deep") == ["a"]
    assert (tmp_path / "deep" / "a").stat().st_mode & 0o055


def run_with_checkpoints(base, folder):
    learner = make_learner(base)
    for step, reward in ((1, 0.5), (2, 0.9), (3, 0.7)):
        learner.step(batch(), 0)
        saved(CheckpointStore(folder / "checkpoints", keep_last=3), learner, step, rewards=[reward])
    return learner


@pytest.mark.parametrize(("which", "step"), [("latest", 3), ("best", 2), (1, 1)])
def test_an_exported_model_loads_with_transformers(base, tmp_path, which, step):
    run_with_checkpoints(base, tmp_path)
    assert export(tmp_path, tmp_path / "out", which).progress.step == step
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / f"step-{step:06d}" / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([3, 4]) == "w3 w4"
    assert f"after step {step}" in (tmp_path / "out" / "README.md").read_text()


def test_export_never_overwrites(base, tmp_path):
    run_with_checkpoints(base, tmp_path)
    (tmp_path / "out").mkdir()
    export(tmp_path, tmp_path / "out")
    before = names(tmp_path / "out")
    with pytest.raises(RunMismatchError, match="not empty"):
        export(tmp_path, tmp_path / "out")
    assert names(tmp_path / "out") == before


def test_exporting_a_missing_checkpoint_lists_the_existing_ones(base, tmp_path):
    with pytest.raises(RunMismatchError, match="no intact checkpoint latest; steps with a checkpoint: none"):
        export(tmp_path, tmp_path / "out")
    run_with_checkpoints(base, tmp_path)
    with pytest.raises(RunMismatchError, match="no intact checkpoint 9; steps with a checkpoint: 1, 2, 3"):
        export(tmp_path, tmp_path / "out", 9)
    assert not (tmp_path / "out").exists()


def test_a_fenced_trainer_neither_adds_nor_removes_checkpoints(base, tmp_path):
    """The old trainer is suspended while it writes a checkpoint; its successor resumes from an earlier step."""
    folder, learner = tmp_path / "checkpoints", make_learner(base)
    saved(CheckpointStore(folder), learner, 1)
    old = CheckpointStore(folder, keep_last=1, folder_lock=RunFolderLock.acquire(tmp_path, 7))
    write = learner.write_trained_weights

    def write_slowly(to):
        write(to)
        heir = CheckpointStore(folder, folder_lock=RunFolderLock.acquire(tmp_path, 8))
        assert heir.latest().progress.step == 1
        saved(heir, make_learner(base), 2)

    learner.write_trained_weights = write_slowly
    with pytest.raises(FencedError):
        saved(old, learner, 3)
    assert names(folder) == ["step-000001", "step-000002"]
    with pytest.raises(FencedError):
        saved(old, make_learner(base), 3)
    assert names(folder) == ["step-000001", "step-000002"]


def test_the_newest_checkpoint_is_the_last_trainers_whatever_its_step(base, tmp_path):
    """Step 3 is unreadable when the second trainer begins and readable later; the ledger was cut to step 1."""
    folder, learner = tmp_path / "checkpoints", make_learner(base)
    saved(CheckpointStore(folder, folder_lock=RunFolderLock.acquire(tmp_path, 7)), learner, 1, 3)
    heir = CheckpointStore(folder, folder_lock=RunFolderLock.acquire(tmp_path, 8))
    saved(heir, learner, 2)
    assert heir.latest().progress.step == 2
    saved(heir, learner, 3)
    assert [c.folder.name for c in heir.list_all()] == ["step-000002", "step-000003-2"]
    assert heir.at_step(3).folder.name == "step-000003-2"


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(base, tmp_path):
    store, learner = CheckpointStore(tmp_path / "run"), make_learner(base)
    assert store.require_latest() is None
    older, newest = (store.save(step, learner, Progress(step=step)) for step in (1, 2))
    manifest = newest.folder / "checkpoint.json"
    whole = manifest.read_bytes()
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 1
        manifest.write_bytes(altered)
        found = store.require_latest()
        is_same = found.folder == newest.folder and found.manifest == newest.manifest  # the byte was white space
        assert is_same or (found.folder == older.folder and store.damaged == [newest.folder]), place
    (older.folder / "optimizer.safetensors").unlink()
    with pytest.raises(RunMismatchError, match="step-000001, step-000002 lack files"):
        store.require_latest()
    manifest.write_bytes(whole)
    assert store.require_latest().folder == newest.folder
