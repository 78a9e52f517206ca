"""Repeats a finished run: a fresh learner trains on the ledger's groups from the archive, step by step.

The order of the ledger tells which groups were in a step's batch: first come the groups that were dropped on the way to
the step, which the same checks drop again; then the batch, groups that the step itself dropped included. The learner is
deterministic, so its weights and optimizer state must equal every checkpoint bit for bit.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from msgspec import Struct

from stream.errors import RunMismatchError
from stream.records import Group
from stream.trainer.archive import ArchivedGroups
from stream.trainer.ledger_records import LedgerLine, read_events, read_ledger
from stream.trainer.outcomes import Dropped, LedgerOutcome, Trained, encode_outcome
from workers.settings import Settings
from workers.train.checkpointing.checkpoint import Checkpoint, CheckpointStore
from workers.train.checkpointing.replay_comparison import (
    CheckpointMatch,
    ReplayMismatch,
    ReplayMismatchFound,
    compare_with_checkpoint,
)
from workers.train.step.collation import collate
from workers.train.step.group_checks import check_group
from workers.train.step.learner import Learner
from workers.train.step.metrics import StepReport
from workers.train.step.reward_parts import with_bounded_rewards


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


def replay(
    settings: Settings,
    folder: Path,
    on_match: Callable[[CheckpointMatch], None] = lambda _: None,
    make_learner: Callable[[Settings], Learner] = Learner,
) -> ReplayReport:
    """Repeat a run up to its newest checkpoint, without changing it.

    The number of ranks must be the run's: sums in another order differ in their last bits.

    Args:
        settings: the run's settings.
        folder: the run's folder.
        on_match: called with each checkpoint that the replay reproduced.
        make_learner: creates the policy and its optimizer.

    Raises:
        RunMismatchError: there is no checkpoint, the ledger is damaged or does not fit the checkpoint, or the archive
            lacks a group.
        RecordError: a group in the archive is damaged.
    """
    checkpoints = CheckpointStore(folder / "checkpoints")
    last = checkpoints.latest()
    if last is None:
        raise RunMismatchError(f"{folder}: there is no intact checkpoint that a replay could be compared with")
    lines = _lines(folder, last)
    archive = ArchivedGroups(folder / "groups")
    _refuse_gaps(lines, archive, settings)
    replayed = _Replay(settings, make_learner(settings), checkpoints, last, on_match)
    difference = None
    try:
        for step, found in groupby(lines, lambda written: written.record.step):
            replayed.step(step, [(w, archive.read(w.record.prompt, w.record.hash)) for w in found])
        replayed.end()
    except ReplayMismatchFound as differs:
        difference = differs.mismatch
    return ReplayReport(
        is_identical=difference is None,
        steps=replayed.learner.steps,
        groups=replayed.groups,
        dropped=replayed.dropped,
        matches=replayed.matches,
        mismatch=difference,
        notes=[*replayed.notes, *_changes(folder)],
    )


class _Replay:
    """A learner that repeats the steps of the ledger."""

    def __init__(
        self,
        settings: Settings,
        learner: Learner,
        checkpoints: CheckpointStore,
        last: Checkpoint,
        on_match: Callable[[CheckpointMatch], None],
    ) -> None:
        self.groups = self.dropped = 0
        self.matches: list[CheckpointMatch] = []
        self.notes: list[str] = []
        self.learner = learner
        self._settings = settings
        self._checkpoints = checkpoints
        self._last = last.progress.step
        self._checkpoint_steps = {checkpoint.progress.step for checkpoint in checkpoints.list_all()}
        self._on_match = on_match
        self._compare(0)

    def step(self, step: int, found: Sequence[tuple[LedgerLine, Group]]) -> None:
        """Repeat one step from its ledger lines and their groups."""
        expected = self.learner.steps + 1
        if step != expected:
            raise _ledger_mismatch(found[0][0], expected, f"is of step {step} where one of step {expected} should come")
        batch = found[self._dropped_before(found) :]
        self.dropped += len(found) - len(batch)
        self.groups += len(batch)
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
        report = self.learner.step(collate([with_bounded_rewards(group) for _, group in batch]), version)
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

    def end(self) -> None:
        """Check, after the last line, that every step up to the newest checkpoint was repeated."""
        if self.learner.steps < self._last:
            what = f"the ledger has {self.learner.steps} steps, the checkpoint {self._last}"
            raise ReplayMismatchFound(ReplayMismatch(step=self._last, description=what))
        if not self.matches:
            raise RunMismatchError(
                f"{self._checkpoints.folder}: every checkpoint was removed during the replay; replay the run when "
                "it has stopped"
            )

    def _dropped_before(self, found: Sequence[tuple[LedgerLine, Group]]) -> int:
        """Return how many of these groups were dropped on the way to the step; the rest were its batch."""
        for place, (written, group) in enumerate(found):
            line = written.record
            if isinstance(line.outcome, Trained):
                return place
            reason = check_group(group, self._settings, line.version, self.learner.vocab_size).drop_reason
            if reason is None:
                return place
            if line.outcome != Dropped(reason):
                raise _ledger_mismatch(
                    written,
                    line.step,
                    f"says {encode_outcome(line.outcome)} of {line.prompt}, the replay dropped:{reason}",
                )
        return len(found)

    def _compare(self, step: int) -> None:
        """Compare the learner with the checkpoint of this step, if there is one."""
        if step not in self._checkpoint_steps:
            return
        try:
            checkpoint = self._checkpoints.at_step(step)
            agreement = None if checkpoint is None else compare_with_checkpoint(self.learner, checkpoint)
        except FileNotFoundError:
            agreement = None
        if agreement is None:
            self.notes.append(
                f"the checkpoint of step {step} was removed during the replay or is damaged; it was not compared"
            )
            return
        self.matches.append(agreement)
        self._on_match(agreement)


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


def _ledger_mismatch(written: LedgerLine, step: int, what: str) -> ReplayMismatchFound:
    return ReplayMismatchFound(ReplayMismatch(step=step, description=f"ledger line {written.number} {what}"))
