"""Repeats a finished run: a fresh learner trains on the ledger's groups from the archive, step by step.

The ledger tells which groups were in a step's batch, those that the step itself dropped included; the others were
dropped on the way to it, and the same checks drop them again. The learner is deterministic, so its weights and
optimizer state must equal every checkpoint bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from msgspec import Struct
from safetensors.torch import load_file
from torch import Tensor

from stream.errors import RunMismatchError
from stream.records import Group
from stream.trainer.archive import ArchivedGroups
from stream.trainer.ledger_records import (
    Dropped,
    LedgerLine,
    LedgerOutcome,
    Trained,
    encode_outcome,
    read_events,
    read_ledger,
)
from workers.settings import Settings
from workers.train.checkpointing.checkpoint import OPTIMIZER, Checkpoint, CheckpointStore
from workers.train.step.batch import collate
from workers.train.step.group_checks import check_group
from workers.train.step.learner import Learner
from workers.train.step.reward_parts import with_bounded_rewards
from workers.train.step.step_metrics import StepReport


class CheckpointMatch(Struct, frozen=True, kw_only=True):
    """A checkpoint that a replay reproduced."""

    step: int
    checkpoint: str
    tensors: int
    """Number of equal tensors: weights, optimizer state, critic."""


class ReplayMismatch(Struct, frozen=True, kw_only=True):
    """The first difference between a replay and the run."""

    step: int
    description: str
    """For people."""
    checkpoint: str = ""
    tensor: str = ""
    max_difference: float | None = None
    """Largest absolute difference of an element; None if the difference is not numeric."""


class ReplayReport(Struct, kw_only=True):
    """The result of a replay."""

    is_identical: bool
    steps: int
    """Steps repeated."""
    groups: int
    """Groups in the batches of those steps."""
    dropped: int
    """Groups dropped on the way to a step."""
    matches: list[CheckpointMatch]
    mismatch: ReplayMismatch | None
    notes: list[str]


class _MismatchFound(Exception):  # noqa: N818  (it carries a result)
    """Ends a replay at the first difference."""

    def __init__(self, mismatch: ReplayMismatch) -> None:
        self.mismatch = mismatch


class Replayer:
    """Repeats a run up to its newest checkpoint, without changing it.

    The number of ranks must be the run's: sums in another order differ in their last bits.

    Args:
        settings: the run's settings.
        folder: the run's folder.
        on_match: called with each checkpoint that the replay reproduced.
        make_learner: creates the policy and its optimizer.

    Raises:
        RunMismatchError: there is no checkpoint, the ledger is damaged or does not fit the checkpoint, or the archive
            lacks a group.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        on_match: Callable[[CheckpointMatch], None] = lambda _: None,
        make_learner: Callable[[Settings], Learner] = Learner,
    ) -> None:
        self._settings, self._folder, self._on_match = settings, folder, on_match
        self._checkpoints = CheckpointStore(folder / "checkpoints")
        last = self._checkpoints.latest()
        if last is None:
            raise RunMismatchError(f"{folder}: there is no intact checkpoint that a replay could be compared with")
        self._last = last.progress.step
        self._checkpoint_steps = {checkpoint.progress.step for checkpoint in self._checkpoints.list_all()}
        self._lines = _lines(folder, last)
        self._archive = ArchivedGroups(folder / "groups")
        _refuse_gaps(self._lines, self._archive, settings)
        self._learner = make_learner(settings)
        self._groups = self._dropped = 0
        self._matches: list[CheckpointMatch] = []
        self._notes: list[str] = []

    def run(self) -> ReplayReport:
        """Train on the groups of every step, and compare with every checkpoint.

        Raises:
            RunMismatchError: every checkpoint was removed meanwhile.
            RecordError: a group in the archive is damaged.
        """
        mismatch = None
        try:
            self._compare(0)
            for step, lines in groupby(self._lines, lambda line: line.record.step):
                self._repeat_step(step, [(w, self._archive.read(w.record.prompt, w.record.hash)) for w in lines])
            self._check_end()
        except _MismatchFound as found:
            mismatch = found.mismatch
        return ReplayReport(
            is_identical=mismatch is None,
            steps=self._learner.steps,
            groups=self._groups,
            dropped=self._dropped,
            matches=self._matches,
            mismatch=mismatch,
            notes=[*self._notes, *_changes(self._folder)],
        )

    def _repeat_step(self, step: int, found: Sequence[tuple[LedgerLine, Group]]) -> None:
        """Repeat one step from its ledger lines and their groups."""
        expected = self._learner.steps + 1
        if step != expected:
            raise _ledger_mismatch(found[0][0], expected, f"is of step {step} where one of step {expected} should come")
        batch = [(written, group) for written, group in found if written.record.in_step]
        self._check_dropped([(written, group) for written, group in found if not written.record.in_step])
        self._dropped += len(found) - len(batch)
        self._groups += len(batch)
        if not batch and step > self._last:
            return  # dropped on the way to a step that never came
        if not batch:
            raise _ledger_mismatch(found[-1][0], step, "ends a step in which no group was left to train on")
        version = batch[0][0].record.version
        for written, _ in batch:
            if written.record.version != version:
                raise _ledger_mismatch(
                    written, step, f"has version {written.record.version}, others of its step {version}"
                )
        report = self._learner.step(collate([with_bounded_rewards(group) for _, group in batch]), version)
        for written, _ in batch:
            end = _outcome(report, written.record.prompt)
            if written.record.outcome != end:
                raise _ledger_mismatch(
                    written,
                    step,
                    f"says {encode_outcome(written.record.outcome)} of {written.record.prompt}, the replay "
                    f"{encode_outcome(end)}",
                )
        self._compare(step)

    def _check_end(self) -> None:
        """Check, after the last line, that every step up to the newest checkpoint was repeated."""
        if self._learner.steps < self._last:
            what = f"the ledger has {self._learner.steps} steps, the checkpoint {self._last}"
            raise _MismatchFound(ReplayMismatch(step=self._last, description=what))
        if not self._matches:
            raise RunMismatchError(
                f"{self._checkpoints.folder}: every checkpoint was removed during the replay; replay the run when "
                "it has stopped"
            )

    def _check_dropped(self, found: Sequence[tuple[LedgerLine, Group]]) -> None:
        """Check that these groups are dropped on the way to the step for the reasons that the ledger has."""
        for written, group in found:
            line = written.record
            reason = check_group(group, self._settings, line.version, self._learner.vocab_size).drop_reason
            if reason is None or line.outcome != Dropped(reason):
                raise _ledger_mismatch(
                    written,
                    line.step,
                    f"says {encode_outcome(line.outcome)} of {line.prompt}, "
                    + (f"the replay dropped:{reason}" if reason else "the replay would train on it"),
                )

    def _compare(self, step: int) -> None:
        """Compare the learner with the checkpoint of this step, if there is one."""
        if step not in self._checkpoint_steps:
            return
        try:
            checkpoint = self._checkpoints.at_step(step)
            agreement = None if checkpoint is None else _compare_with_checkpoint(self._learner, checkpoint)
        except FileNotFoundError:
            agreement = None
        if agreement is None:
            self._notes.append(
                f"the checkpoint of step {step} was removed during the replay or is damaged; it was not compared"
            )
            return
        self._matches.append(agreement)
        self._on_match(agreement)


def _compare_with_checkpoint(learner: Learner, checkpoint: Checkpoint) -> CheckpointMatch:
    """Compare all tensors of a learner with a checkpoint.

    Raises:
        _MismatchFound: a tensor differs; names the first one.
        FileNotFoundError: the checkpoint was removed during the comparison.
    """
    tensors, name_of, step = 0, checkpoint.folder.name, checkpoint.progress.step
    for kind, ours, theirs in _states(learner, checkpoint):
        for name in sorted(ours.keys() | theirs.keys()):
            tensors, largest = tensors + 1, None
            if name not in ours or name not in theirs:
                what = f"is in {'the replay' if name in ours else 'the checkpoint'} alone"
            elif (largest := _max_difference(ours[name], theirs[name])) is not None:
                what = f"differs by up to {largest:.3g}"
            else:
                continue
            text = f"{kind} {name} {what}"
            raise _MismatchFound(
                ReplayMismatch(step=step, description=text, checkpoint=name_of, tensor=name, max_difference=largest)
            )
    return CheckpointMatch(step=step, checkpoint=name_of, tensors=tensors)


def _states(learner: Learner, checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """Yield kind, the learner's tensors and the checkpoint's: weights as written, then all other state."""
    policy = learner.policy
    whole = policy.parameters if policy.adapter else learner.weights()
    weights = {name: whole[name].detach().cpu().to(policy.saved_dtype).float() for name in policy.parameters}
    yield "weight", weights, policy.load_trained_weights(checkpoint.model)
    yield "state", learner.state(), load_file(checkpoint.folder / OPTIMIZER)


def _max_difference(ours: Tensor, theirs: Tensor) -> float | None:
    """Return the largest absolute difference of an element; None if all bits are equal."""
    if ours.shape == theirs.shape and ours.dtype == theirs.dtype:
        bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (ours, theirs)]
        if torch.equal(*bits):
            return None
        return float((ours.double() - theirs.double()).abs().max())
    return float("inf")


def _lines(folder: Path, last: Checkpoint) -> list[LedgerLine]:
    """Return the ledger lines up to a checkpoint's length."""
    path, end_offset = folder / "ledger.jsonl", last.progress.ledger_bytes
    lines, broken = read_ledger(path)
    if broken:
        raise RunMismatchError(broken[0])
    lines = [written for written in lines if written.end_offset <= end_offset]
    if not _is_line_end(path, end_offset):  # the last line may be an event, which `read_ledger` leaves out
        raise RunMismatchError(
            f"{path}: no line ends at byte {end_offset}, where it ended when {last.folder.name} was made; it was "
            "altered"
        )
    return [written for written in lines if written.record.has_group]


def _is_line_end(path: Path, offset: int) -> bool:
    if not offset:
        return True
    with path.open("rb") as file:
        file.seek(offset - 1)
        return file.read(1) == b"\n"


def _changes(folder: Path) -> list[str]:
    """Return a note for each setting that was changed during the run: the replay knows only the last ones."""
    return [
        f"{event.details.get('name')} was changed at step {event.step}; the replay used the values of the last start"
        for event in read_events(folder / "ledger.jsonl")
        if event.event == "setting_changed"
    ]


def _refuse_gaps(lines: Sequence[LedgerLine], archive: ArchivedGroups, settings: Settings) -> None:
    missing = [w for w in lines if (w.record.prompt, w.record.hash) not in archive]
    if not missing:
        return
    first, keep = missing[0], settings.archive.keep
    raise RunMismatchError(
        f"{archive.folder} lacks {len(missing)} of the {len(lines)} groups of the ledger, the first of them line "
        f"{first.number}, {first.record.prompt} with hash {first.record.hash}. A replay needs all of them, and the "
        "run has "
        f"archive.keep = {keep!r}; set it to 'all' from the beginning of a run that is to be replayed"
    )


def _outcome(report: StepReport, prompt: str) -> LedgerOutcome:
    """Return the outcome that the trainer records for a group of this step."""
    if prompt in report.dropped:
        return Dropped(report.dropped[prompt])
    return Trained() if report.trained else Dropped(report.skipped)


def _ledger_mismatch(written: LedgerLine, step: int, what: str) -> _MismatchFound:
    return _MismatchFound(ReplayMismatch(step=step, description=f"ledger line {written.number} {what}"))
