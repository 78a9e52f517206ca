"""Repeats a finished run: a fresh learner trains on the ledger's groups from the archive, step by step.

The ledger says which groups were in the batch of a step; the step itself may have dropped some of them. All other
groups were dropped on the way to a step: the replay repeats the checks, which must drop them for the same reasons. The
learner is deterministic, so its weights and optimizer state must equal every checkpoint bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """What differs, as a text."""
    checkpoint: str = ""
    tensor: str = ""
    max_difference: float | None = None
    """Largest absolute difference of an element; None if the difference is not numeric."""


class ReplayReport(Struct, kw_only=True):
    """The result of a replay."""

    is_identical: bool
    steps: int
    """Number of steps that were repeated."""
    groups: int
    """Number of groups in the batches of these steps."""
    dropped: int
    """Number of groups that were dropped on the way to a step."""
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
        self._last_step = last.progress.step
        self._micro_batch_tokens = last.progress.micro_batch_tokens
        self._checkpoint_steps = {checkpoint.progress.step for checkpoint in self._checkpoints.list_all()}
        self._lines = _ledger_lines(folder, last)
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
                self._repeat_step(step, self._read_groups(lines))
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
            notes=[*self._notes, *_setting_changes(self._folder)],
        )

    def _read_groups(self, lines: Iterable[LedgerLine]) -> list[tuple[LedgerLine, Group]]:
        """Return ledger lines, each with its group from the archive."""
        return [(line, self._archive.read(line.record.prompt, line.record.hash)) for line in lines]

    def _repeat_step(self, step: int, groups: Sequence[tuple[LedgerLine, Group]]) -> None:
        """Repeat one step from its ledger lines and their groups."""
        expected = self._learner.steps + 1
        if step != expected:
            raise _ledger_mismatch(
                groups[0][0], expected, f"is of step {step}, but a line of step {expected} must come next"
            )
        batch = [(line, group) for line, group in groups if line.record.in_step]
        self._check_dropped([(line, group) for line, group in groups if not line.record.in_step])
        self._dropped += len(groups) - len(batch)
        self._groups += len(batch)
        if not batch and step > self._last_step:
            return  # dropped on the way to a step that never came
        if not batch:
            raise _ledger_mismatch(groups[-1][0], step, "ends a step in which no group was left to train on")
        self._use_micro_batch_tokens()
        version = batch[0][0].record.version
        for line, _ in batch:
            if line.record.version != version:
                raise _ledger_mismatch(
                    line, step, f"has policy version {line.record.version}, but others of its step have {version}"
                )
        report = self._learner.step(collate([with_bounded_rewards(group) for _, group in batch]), version)
        for line, _ in batch:
            outcome = _outcome(report, line.record.prompt)
            if line.record.outcome != outcome:
                raise _ledger_mismatch(
                    line,
                    step,
                    f"says that the outcome of {line.record.prompt} is {encode_outcome(line.record.outcome)}, but in "
                    f"the replay it is {encode_outcome(outcome)}",
                )
        self._compare(step)

    def _use_micro_batch_tokens(self) -> None:
        """Use the tokens of a pass that the run used for the next step, if it chose them."""
        used = [tokens for steps, tokens in self._micro_batch_tokens if steps <= self._learner.steps]
        if used and self._learner.choice is not None and used[-1] != self._learner.micro_batch_tokens:
            self._learner.use_micro_batch_tokens(used[-1])

    def _check_end(self) -> None:
        """Check, after the last line, that every step up to the newest checkpoint was repeated."""
        if self._learner.steps < self._last_step:
            what = f"the ledger has {self._learner.steps} steps, but the newest checkpoint is of step {self._last_step}"
            raise _MismatchFound(ReplayMismatch(step=self._last_step, description=what))
        if not self._matches:
            raise RunMismatchError(
                f"{self._checkpoints.folder}: every checkpoint was removed during the replay; replay the run when "
                "it has stopped"
            )

    def _check_dropped(self, groups: Sequence[tuple[LedgerLine, Group]]) -> None:
        """Check that these groups, which never came into a batch, are dropped for the reasons that the ledger names."""
        for line, group in groups:
            record = line.record
            reason = check_group(group, self._settings, record.version, self._learner.vocab_size).drop_reason
            if reason is None or record.outcome != Dropped(reason):
                raise _ledger_mismatch(
                    line,
                    record.step,
                    f"says that the outcome of {record.prompt} is {encode_outcome(record.outcome)}, but the replay "
                    + (f"drops it for {reason}" if reason else "would train on it"),
                )

    def _compare(self, step: int) -> None:
        """Compare the learner with the checkpoint of this step, if there is one."""
        if step not in self._checkpoint_steps:
            return
        try:
            checkpoint = self._checkpoints.at_step(step)
            checkpoint_match = None if checkpoint is None else _compare_with_checkpoint(self._learner, checkpoint)
        except FileNotFoundError:
            checkpoint_match = None
        if checkpoint_match is None:
            self._notes.append(
                f"the checkpoint of step {step} was removed during the replay or is damaged; it was not compared"
            )
            return
        self._matches.append(checkpoint_match)
        self._on_match(checkpoint_match)


def _compare_with_checkpoint(learner: Learner, checkpoint: Checkpoint) -> CheckpointMatch:
    """Compare all tensors of a learner with a checkpoint.

    Raises:
        _MismatchFound: a tensor differs; names the first one.
        FileNotFoundError: the checkpoint was removed during the comparison.
    """
    tensors, folder_name, step = 0, checkpoint.folder.name, checkpoint.progress.step
    for kind, ours, theirs in _tensors_of_both(learner, checkpoint):
        for name in sorted(ours.keys() | theirs.keys()):
            tensors, largest = tensors + 1, None
            if name not in ours or name not in theirs:
                what = f"is only in {'the replay' if name in ours else 'the checkpoint'}"
            elif (largest := _max_difference(ours[name], theirs[name])) is not None:
                what = f"differs by up to {largest:.3g}"
            else:
                continue
            text = f"{kind} {name} {what}"
            raise _MismatchFound(
                ReplayMismatch(step=step, description=text, checkpoint=folder_name, tensor=name, max_difference=largest)
            )
    return CheckpointMatch(step=step, checkpoint=folder_name, tensors=tensors)


def _tensors_of_both(
    learner: Learner, checkpoint: Checkpoint
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
    """Yield a kind, and the learner's and the checkpoint's tensors of it: weights as saved, then all other state."""
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


def _ledger_lines(folder: Path, last: Checkpoint) -> list[LedgerLine]:
    """Return the lines with a group that the ledger had when the checkpoint was made."""
    path, end_offset = folder / "ledger.jsonl", last.progress.ledger_bytes
    lines, broken = read_ledger(path)
    if broken:
        raise RunMismatchError(broken[0])
    lines = [line for line in lines if line.end_offset <= end_offset]
    if not _is_line_end(path, end_offset):  # the last line may be an event, which `read_ledger` leaves out
        raise RunMismatchError(
            f"{path}: no line ends at byte {end_offset}, where it ended when {last.folder.name} was made; it was "
            "altered"
        )
    return [line for line in lines if line.record.has_group]


def _is_line_end(path: Path, offset: int) -> bool:
    if not offset:
        return True
    with path.open("rb") as file:
        file.seek(offset - 1)
        return file.read(1) == b"\n"


def _setting_changes(folder: Path) -> list[str]:
    """Return a note for each setting that was changed during the run; the replay uses the last start's throughout."""
    return [
        f"{event.details.get('name')} was changed at step {event.step}; the replay used the values of the last start"
        for event in read_events(folder / "ledger.jsonl")
        if event.event == "setting_changed"
    ]


def _refuse_gaps(lines: Sequence[LedgerLine], archive: ArchivedGroups, settings: Settings) -> None:
    missing = [line for line in lines if (line.record.prompt, line.record.hash) not in archive]
    if not missing:
        return
    first, keep = missing[0], settings.archive.keep
    raise RunMismatchError(
        f"{archive.folder} lacks {len(missing)} of the {len(lines)} groups of the ledger; the first is on line "
        f"{first.number}: {first.record.prompt} with hash {first.record.hash}. A replay needs all of them, but this "
        f"run has archive.keep = {keep!r}; set it to 'all' before you start a run that you want to replay"
    )


def _outcome(report: StepReport, prompt: str) -> LedgerOutcome:
    """Return the outcome that the trainer records for a group of this step."""
    if prompt in report.dropped:
        return Dropped(report.dropped[prompt])
    return Trained() if report.trained else Dropped(report.skipped)


def _ledger_mismatch(line: LedgerLine, step: int, what: str) -> _MismatchFound:
    return _MismatchFound(ReplayMismatch(step=step, description=f"ledger line {line.number} {what}"))
