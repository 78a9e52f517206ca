"""A run of a few steps on a small model, recorded as a trainer does, is replayed; then its records are falsified."""

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from stream.codec import encode
from stream.errors import PenstockError, RecordError, RunMismatchError
from stream.records import Group
from stream.trainer.archive import Archive, ArchivedGroups, scan_archive
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped, LedgerRecord, Trained, content_hash, encode_record, read_ledger
from tests.cases.groups import random_group
from tests.cases.models import loaded_once, write_small_qwen3
from workers.evaluate.replay import show_replay
from workers.runs.find import open_run
from workers.runs.progress import Progress
from workers.settings import Settings
from workers.settings.toml_file import dump_settings, parse_settings
from workers.train.checkpointing.checkpoint import MANIFEST, OPTIMIZER, CheckpointStore, Manifest
from workers.train.checkpointing.replayer import Replayer
from workers.train.step.batch import collate
from workers.train.step.group_checks import check_group
from workers.train.step.learner import Learner

pytestmark = pytest.mark.models

VOCABULARY = 24
STEPS, EACH = 6, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with loaded_once():
        yield write_small_qwen3(tmp_path_factory.mktemp("base"), VOCABULARY, layers=2, tied=True)


def group(number: int, version: int) -> Group:
    """Make a group of four completions; every fifth group has equal rewards, and is dropped."""
    rewards = [1.0] * 4 if number % 5 == 4 else [0.0, 1.0, 0.0, 1.0]
    return random_group(number, version, vocabulary=VOCABULARY, rewards=rewards)


class Made:
    """A run's folder, and the trainer's work in it."""

    def __init__(self, base: Path, folder: Path, **sections) -> None:
        self.folder = folder
        self.ledger = folder / "ledger.jsonl"
        self.late_step = 0
        """A step whose groups are two versions old, and were checked one version before it."""
        table = {
            "run": {"folder": str(folder)},
            "model": {"path": str(base)},
            "data": {"path": "none"},
            "rewards": [{"ref": "a:b"}],
            "rollout": {"group_size": 4},
            "train": {"learning_rate": 1e-2, "batch_size": EACH},
            "archive": {"keep": "all"},
        }
        self.settings = parse_settings(table | sections)

    def run(self, checkpoints: tuple[int, ...] = (2, 4, STEPS), killed_after: int = 0) -> "Made":
        """Train and record. After step `killed_after` the trainer is killed once, and resumes from a checkpoint."""
        kept = CheckpointStore(self.folder / "checkpoints", keep_last=10)
        learner, progress = Learner(self.settings), Progress(version=0)
        ledger, archive = Ledger(self.ledger), Archive(self.folder / "groups")
        number = 0
        while progress.step < STEPS:
            learner, archive, ledger = self.step(learner, archive, ledger, progress, range(number, number + 4))
            number += 4
            if progress.step in checkpoints:
                archive.sync()
                progress.ledger_bytes = ledger.sync()
                kept.save(progress.step, learner, progress)
            if progress.step == killed_after:
                killed_after = 0
                archive.close()
                ledger.close()
                result = kept.latest()
                learner, progress = Learner(self.settings), result.progress
                result.restore(learner)
                number = 4 * progress.step
                ledger, archive = Ledger(self.ledger, progress.ledger_bytes), Archive(self.folder / "groups")
        archive.close()
        ledger.close()
        (self.folder / "run.toml").write_text(dump_settings(self.settings))
        return self

    def step(self, learner, archive, ledger, progress, numbers):
        """Train on four groups, less one with equal rewards, and record all as `Collector` and `Trainer` do."""
        step, version, hand = progress.step + 1, progress.version, []
        late = int(step == self.late_step)
        for number in numbers:
            made = group(number, version - 2 * late)
            reason = check_group(made, self.settings, version - late, VOCABULARY).drop_reason
            if reason is None:
                hand.append(made)
            else:
                self.write(archive, ledger, [(made, Dropped(reason))], step, version - late)
        hand.sort(key=lambda each: each.prompt.id)
        report = learner.step(collate(hand), version)
        outcome = Trained() if report.trained else Dropped(report.skipped)
        ends = [Dropped(report.dropped[g.prompt.id]) if g.prompt.id in report.dropped else outcome for g in hand]
        self.write(archive, ledger, list(zip(hand, ends, strict=True)), step, version, in_step=True)
        progress.step, progress.version = step, version + 1
        return learner, archive, ledger

    @staticmethod
    def write(archive, ledger, ended, step, version, *, in_step=False) -> None:
        lines = [LedgerRecord(made.prompt.id, end, step, version, content_hash(made), in_step) for made, end in ended]
        archive.write((line, encode(made)) for line, (made, _) in zip(lines, ended, strict=True))
        ledger.append(lines)

    def replay(self, settings: Settings | None = None):
        return Replayer(settings or self.settings, self.folder).run()

    def lines(self) -> list[LedgerRecord]:
        return [written.record for written in read_ledger(self.ledger)[0]]

    def rewrite(self, lines: list[LedgerRecord]) -> None:
        """Replace the ledger's records, and its length in the checkpoints, as a careful forger would."""
        text = [encode_record(line) + b"\n" for line in lines]
        self.ledger.write_bytes(b"".join(text))
        self.forge_length(sum(map(len, text)))

    def forge_length(self, length: int) -> None:
        last = CheckpointStore(self.folder / "checkpoints").latest()
        manifest = json.loads((last.folder / MANIFEST).read_text())
        manifest["progress"]["ledger_bytes"] = length
        sign(last.folder, manifest)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A run that no test changes."""
    return Made(base, tmp_path_factory.mktemp("whole") / "run").run()


@pytest.fixture
def made(whole, base, tmp_path):
    """A copy of the whole run."""
    shutil.copytree(whole.folder, tmp_path / "run")
    copy = Made(base, tmp_path / "run")
    (copy.folder / "run.toml").write_text(dump_settings(copy.settings))
    return copy


def test_a_change_of_code_during_the_run_is_noted(made):
    with made.ledger.open("ab") as file:
        file.write(b'{"event": "setting_changed", "step": 2, "details": {"name": "rewards.exact.code"}}\n')
    made.forge_length(made.ledger.stat().st_size)  # the checkpoint was made after the change
    report = made.replay()
    assert report.is_identical
    assert report.notes == ["rewards.exact.code was changed at step 2; the replay used the values of the last start"]


def test_a_replay_reproduces_every_checkpoint_bit_for_bit(made, capsys):
    report = made.replay()
    assert (report.is_identical, report.mismatch, report.notes) == (True, None, [])
    assert [each.step for each in report.matches] == [2, 4, STEPS]
    assert (report.steps, report.groups, report.dropped) == (STEPS, len(made.lines()) - 4, 4)
    assert show_replay(open_run(made.folder)) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("step 2: step-000002 is equal (")
    assert out[-1] == f"equal bit for bit after {STEPS} steps: {report.groups} groups, 4 dropped"
    assert show_replay(open_run(made.folder), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["is_identical"] is True


CASES = {
    "gae": {"estimator": {"name": "gae"}},
    "bfloat16": {"dtype": "bfloat16"},
    "kl, two updates": {"algorithm": {"kl_coefficient": 0.1}, "train": {"updates_per_batch": 2}},
    "a falling rate": {"train": {"schedule": "cosine", "max_steps": STEPS, "warmup_steps": 2}},
    "rejection": {"correction": {"reject": {"token_k1": [0.3, 1.5]}}},
    "rejection of everything": {"correction": {"reject": {"token_k1": [1e8, 1e9]}}},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_repeated_steps_are_replayed_as_the_resumed_trainer_did_them(base, tmp_path, case):
    sections = dict(case)
    train = {"learning_rate": 1e-2, "batch_size": EACH} | sections.pop("train", {})
    model = {"path": str(base), "dtype": sections.pop("dtype", "float32")}
    made = Made(base, tmp_path / "run", train=train, model=model, **sections).run((3, STEPS), killed_after=5)
    assert len(list(scan_archive(made.folder / "groups"))) > len(made.lines())
    report = made.replay()
    assert report.is_identical, report.mismatch
    assert [each.step for each in report.matches] == [3, STEPS]


def test_skipped_steps_differ_from_groups_dropped_on_the_way(base, tmp_path):
    nothing = {"correction": {"reject": {"token_k1": [1e8, 1e9]}}}
    made = Made(base, tmp_path / "run", **nothing).run()
    ends = {line.outcome for line in made.lines()}
    assert ends == {Dropped("zero_variance"), Dropped("no_valid_row")}
    report = made.replay()
    assert report.is_identical
    assert report.dropped == sum(line.outcome == Dropped("zero_variance") for line in made.lines())


def test_groups_that_became_too_old_by_their_step_are_in_its_batch(base, tmp_path):
    """Another check at the step's version drops them, for the reason that the step had: only the ledger can tell."""
    made = Made(base, tmp_path / "run", pacing={"max_token_age": 1})
    made.late_step = 3
    lines = made.run().lines()
    assert {line.outcome for line in lines if line.in_step and line.step == 3} == {Dropped("no_valid_row")}
    report = made.replay()
    assert report.is_identical, report.mismatch
    assert (report.steps, report.groups) == (STEPS, sum(line.in_step for line in lines))


# --- falsified records


def test_different_weights_are_reported_with_tensor_step_and_size(made, capsys):
    checkpoint = CheckpointStore(made.folder / "checkpoints").at_step(4)
    path = checkpoint.model / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors)
    tensors[name].view(-1)[0] += 0.5
    forge(checkpoint, path, tensors)
    report = made.replay()
    assert not report.is_identical
    assert [each.step for each in report.matches] == [2]
    difference = report.mismatch
    assert (difference.step, difference.checkpoint, difference.tensor) == (4, "step-000004", name)
    assert difference.max_difference == pytest.approx(0.5, rel=1e-3)
    assert show_replay(open_run(made.folder)) == 1
    assert f"different: step 4: step-000004: weight {name} differs by up to 0.5" in capsys.readouterr().out


def test_a_changed_bit_of_a_moment_is_found(made):
    checkpoint = CheckpointStore(made.folder / "checkpoints").at_step(STEPS)
    path = checkpoint.folder / OPTIMIZER
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.startswith("exp_avg."))
    tensors[name].view(torch.int32).view(-1)[0] ^= 1
    forge(checkpoint, path, tensors)
    assert made.replay().mismatch.tensor == name


def forge(checkpoint, path: Path, tensors) -> None:
    """Write tensors and update the manifest to match."""
    from workers.train.checkpointing.checkpoint import _inventory

    save_file(tensors, path)
    manifest = json.loads((checkpoint.folder / MANIFEST).read_text())
    (checkpoint.folder / MANIFEST).unlink()
    manifest["files"] = msgspec.to_builtins(_inventory(checkpoint.folder))
    sign(checkpoint.folder, manifest)


def sign(folder: Path, manifest: dict) -> None:
    """Write a manifest with its digest."""
    whole = msgspec.convert(manifest, Manifest).with_digest()
    (folder / MANIFEST).write_bytes(msgspec.json.encode(whole))


def test_a_replaced_group_with_a_forged_ledger_line_is_found(made):
    lines = made.lines()
    place = next(i for i, line in enumerate(lines) if line.outcome == Trained())
    other = group(1000, lines[place].version)
    other.prompt.id = lines[place].prompt
    lines[place] = msgspec.structs.replace(lines[place], hash=content_hash(other))
    archive = Archive(made.folder / "groups")
    archive.write([(lines[place], encode(other))])
    archive.close()
    made.rewrite(lines)
    difference = made.replay().mismatch
    assert difference.step == 2
    assert difference.tensor
    assert difference.max_difference > 0


@pytest.mark.parametrize("which", [0, -1])
def test_a_damaged_archived_group_is_reported_with_its_offset(made, which):
    line = made.lines()[which]
    place = {(result.prompt, result.hash): place for result, place in scan_archive(made.folder / "groups")}[
        line.prompt, line.hash
    ]
    content = bytearray(place.file.read_bytes())
    content[place.offset + place.size // 2] ^= 1
    place.file.write_bytes(content)
    with pytest.raises(RecordError, match=rf"byte {place.offset}: the group of prompt {line.prompt}: damaged"):
        made.replay()


def trained_line(lines: list[LedgerRecord]) -> int:
    return [i for i, line in enumerate(lines) if line.outcome == Trained()][4]


ALTERED = {
    "version": ({"version": 7}, r"ledger line \d+ has policy version \d, but others of its step have \d"),
    "end": ({"outcome": Dropped("zero_variance")}, r"of .* is dropped:zero_variance, but in the replay it is trained"),
    "step": ({"step": 5}, r"line 5 ends a step in which no group was left"),
}


@pytest.mark.parametrize(("change", "words"), ALTERED.values(), ids=ALTERED)
def test_an_altered_ledger_line_is_reported_by_number(made, change, words):
    lines = made.lines()
    lines[trained_line(lines)] = msgspec.structs.replace(lines[trained_line(lines)], **change)
    made.rewrite(lines)
    difference = made.replay().mismatch
    assert difference is not None
    assert re.search(words, difference.description), difference


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hash": "0" * 24}, r"lacks 1 of the \d+ groups of the ledger; the first is on line \d+: prompts:0"),
        ({"prompt": "prompts:0:999"}, r"lacks 1 of the .*prompts:0:999"),
    ],
)
def test_a_ledger_line_without_a_group_is_reported(made, change, words):
    lines = made.lines()
    lines[3] = msgspec.structs.replace(lines[3], **change)
    made.rewrite(lines)
    with pytest.raises(RunMismatchError, match=words):
        made.replay()


def test_an_invalid_ledger_line_or_length_is_refused(made):
    whole = made.ledger.read_bytes()
    made.ledger.write_bytes(whole.replace(b'"trained"', b'"trainee"', 1))
    with pytest.raises(RunMismatchError, match="'trainee' is not an outcome"):
        made.replay()
    made.ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[1:]))
    with pytest.raises(RunMismatchError, match=r"no line ends at byte \d+"):
        made.replay()


def test_a_missing_ledger_line_is_found_even_if_the_length_fits(made):
    lines = made.lines()
    gone = trained_line(lines)
    made.rewrite(lines[:gone] + lines[gone + 1 :])
    assert made.replay().mismatch.step == 2
    made.rewrite([line for line in lines if line.step < STEPS])
    assert made.replay().mismatch.description == (
        f"the ledger has {STEPS - 1} steps, but the newest checkpoint is of step {STEPS}"
    )


def test_a_group_missing_from_a_bounded_archive_names_the_setting(base, tmp_path):
    made = Made(base, tmp_path / "run", archive={"keep": 3}).run()
    next((made.folder / "groups").glob("*.groups")).unlink()
    total = len(made.lines())
    with pytest.raises(RunMismatchError, match=rf"lacks {total} of .* archive.keep = 3; set it to 'all'"):
        made.replay()


def test_a_damaged_checkpoint_is_skipped_and_the_replay_ends_at_the_one_before(made):
    path = CheckpointStore(made.folder / "checkpoints").at_step(STEPS).folder / OPTIMIZER
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    report = made.replay()
    assert report.is_identical
    assert report.steps == 4


def test_a_replay_needs_a_checkpoint(base, tmp_path):
    made = Made(base, tmp_path / "run").run(checkpoints=())
    with pytest.raises(RunMismatchError, match="no intact checkpoint"):
        made.replay()


def test_other_settings_than_the_runs_give_a_difference(made):
    train = msgspec.structs.replace(made.settings.train, learning_rate=2e-2)
    difference = made.replay(msgspec.structs.replace(made.settings, train=train)).mismatch
    assert difference.step == 2


def test_a_replay_needs_the_runs_folder(tmp_path):
    with pytest.raises(PenstockError, match="neither a run's folder"):
        show_replay(open_run(tmp_path))


def test_nothing_is_changed(made):
    def contents():
        return {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}

    before = contents()
    made.replay()
    assert contents() == before
    assert len(ArchivedGroups(made.folder / "groups")) == len(made.lines())


def test_a_run_whose_micro_batches_became_smaller_is_repeated_step_by_step(base, tmp_path):
    """Smaller micro-batches sum gradients in another order, which the last bits show."""
    made = Made(base, tmp_path / "run")
    step = made.step

    def with_fewer_tokens_later(learner, archive, ledger, progress, numbers):
        tokens = 64 if progress.step < 3 else 16
        if not progress.micro_batch_tokens or progress.micro_batch_tokens[-1][1] != tokens:
            progress.micro_batch_tokens = [*progress.micro_batch_tokens, (progress.step, tokens)]
        learner.use_micro_batch_tokens(tokens)
        return step(learner, archive, ledger, progress, numbers)

    made.step = with_fewer_tokens_later
    made.run()
    assert made.replay().is_identical
    unrecorded = CheckpointStore(made.folder / "checkpoints").latest()
    manifest = json.loads((unrecorded.folder / MANIFEST).read_text())
    manifest["progress"]["micro_batch_tokens"] = [[0, 16]]
    sign(unrecorded.folder, manifest)
    assert not made.replay().is_identical, "the bound of the last steps gives other bits in the first ones"
