"""The archived groups of a run, for everything that shows them: commands, exports and the dashboard.

The ledger decides which archived groups count; without one, all do. A run is only read: it may be running, stopped,
killed or finished. Everything here blocks on files.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock

from msgspec import structs

from stream.codec import decode
from stream.errors import PenstockError, RecordError
from stream.records import Group, TrainedCompletion
from stream.trainer.annotations import read_annotations
from stream.trainer.archive import ArchivedGroups, ArchiveOffset, scan_archive
from stream.trainer.ledger_records import LedgerRecord, LedgerTail
from stream.trainer.outcomes import Dead, Dropped, encode_outcome
from workers.commands.transcripts.run_completions import RunCompletion


class ArchivedRunGroups:
    """The groups of a run's ledger, in its order, and where the archive has them. For threads.

    A group's number is its position in `records`, and never changes. Of the archive no more is read than what is asked
    for: positions segment by segment, groups one by one.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledger = LedgerTail(folder / "ledger.jsonl")
        self._archive = ArchivedGroups(folder / "groups")
        self._lock = Lock()
        self._is_outdated = False
        self._records: list[LedgerRecord] = []
        self._by_prompt: dict[str, int] = {}
        self._without_group: dict[str, LedgerRecord] = {}
        """The last record of each prompt that has one without a group."""
        self._annotated: tuple[LedgerRecord, Sequence[TrainedCompletion]] | None = None
        """Annotations of the group that was annotated last."""
        self.damaged: list[str] = []
        """Messages about groups that `completions` could not read."""
        self._without_ledger = not self._ledger.exists()
        if self._without_ledger:  # the run was killed as its first group ended, or it never had one
            found = {(record.prompt, record.hash): record for record, _ in scan_archive(folder / "groups")}
            self._add(found.values())
        self.refresh()

    def __len__(self) -> int:
        """Return the number of groups that the archive still has."""
        return sum(1 for _ in self.numbers())

    @property
    def records(self) -> Sequence[LedgerRecord]:
        """The ledger's records of all groups, also of those that the archive does not have any more."""
        return self._records

    @property
    def missing(self) -> int:
        """Groups of the ledger that the archive does not have any more."""
        return len(self._records) - len(self)

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last archived step; None without a group."""
        archived = [self._records[number].step for number in self.numbers()]
        return (archived[0], archived[-1]) if archived else None

    def refresh(self) -> bool:
        """Read what was added to ledger and archive since the last call.

        Returns:
            False if the ledger was cut meanwhile, as a run does that resumes from a checkpoint, or if it is new. The
            groups stay as they were read: make a new object.
        """
        with self._lock:
            records, is_cut = self._ledger.read_new()
            self._is_outdated |= is_cut or (self._without_ledger and self._ledger.exists())
            if self._is_outdated:
                return False
            self._archive.refresh()  # after the ledger: what that has is in the archive already
            self._add(records)
            return True

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of the groups that the archive still has."""
        return (number for number in range(len(self._records)) if self._find(number) is not None)

    def find(self, prompt: str) -> int | None:
        """Return the number of the last group of a prompt; None if the ledger has none."""
        return self._by_prompt.get(prompt)

    def why_none(self, prompt: str) -> str:
        """Return why a prompt has no group, as a sentence; empty if the ledger says nothing about it."""
        record = self._without_group.get(prompt)
        match record.outcome if record else None:
            case Dead(reason):
                return f"Prompt {prompt} is a dead letter ({reason})."
            case Dropped():
                return f"Prompt {prompt} was a dead letter that an operator dropped."
            case _:
                return ""

    def locate(self, number: int) -> ArchiveOffset:
        """Return the position of a group in the archive.

        Raises:
            PenstockError: the archive does not have it.
        """
        offset = self._find(number)
        if offset is None:
            prompt = self._records[number].prompt
            raise PenstockError(f"the group of prompt {prompt} is not in the archive (archive.keep)")
        return offset

    def read(self, number: int) -> tuple[Group, list[TrainedCompletion]]:
        """Return a group, and what the trainer did with each completion that is not greedy, as far as archived.

        Raises:
            RecordError: the group is damaged.
            PenstockError: the archive does not have it.
        """
        offset = self.locate(number)
        return decode(offset.read_payload(), Group), offset.read_completions()

    def annotations(self, number: int) -> list[TrainedCompletion] | None:
        """Return what the trainer did with each completion that is not greedy, and with its tokens; None if unknown."""
        return read_annotations(self._folder, self._records[number])

    def completions(
        self, steps: Container[int] | None = None, *, newest_first: bool = False
    ) -> Iterator[RunCompletion]:
        """Yield the completions of groups of these steps; damaged groups are left out and added to `damaged`."""
        known = range(len(self._records))
        for number in reversed(known) if newest_first else known:
            if (steps is None or self._records[number].step in steps) and self._find(number) is not None:
                yield from self._completions_of(number)

    def annotate(self, found: RunCompletion) -> RunCompletion:
        """Return a completion with what the step did with each of its tokens, if that is recorded."""
        if found.record is None or found.trained is None:
            return found
        if self._annotated is None or self._annotated[0] is not found.record:
            self._annotated = found.record, read_annotations(self._folder, found.record) or []
        others = [each for each in found.group.completions if not each.greedy]
        position = next(at for at, each in enumerate(others) if each is found.completion)
        annotated = self._annotated[1]
        return structs.replace(found, trained=annotated[position]) if position < len(annotated) else found

    def _add(self, records: Iterable[LedgerRecord]) -> None:
        for record in records:
            if record.has_group:
                self._by_prompt[record.prompt] = len(self._records)
                self._records.append(record)
            else:
                self._without_group[record.prompt] = record

    def _find(self, number: int) -> ArchiveOffset | None:
        record = self._records[number]
        return self._archive.find(record.prompt, record.hash, record.step)

    def _completions_of(self, number: int) -> Iterator[RunCompletion]:
        record, offset = self._records[number], self.locate(number)
        try:
            group, known = self.read(number)
        except (RecordError, PenstockError) as error:
            self.damaged.append(f"{offset.file.name}, byte {offset.offset}: {error}")
            return
        trained = iter(known)
        for completion in group.completions:
            yield RunCompletion(
                group=group,
                completion=completion,
                outcome=encode_outcome(record.outcome),
                step=record.step,
                trained=None if completion.greedy else next(trained, None),
                record=record,
            )
