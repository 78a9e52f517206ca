"""The groups of a run and their completions: archived ones, and those without an outcome, which are on the server.

The ledger decides which archived groups count; without a ledger all of them do. Nothing here changes the run, which may
be running, stopped, killed or finished.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

from msgspec import Struct, structs

from stream.codec import decode
from stream.errors import PenstockError, RecordError
from stream.records import Completion, Failure, Group, TrainedCompletion
from stream.trainer.archive import ArchivedGroups, ArchiveOffset, scan_archive
from stream.trainer.ledger_records import Dead, Dropped, LedgerRecord, LedgerTail, encode_outcome
from stream.trainer.trained_tokens import read_trained_tokens
from stream.validity import Measured, Reward, TruncationReason
from stream.wording import escape_controls
from workers.runs.branches import BranchView, describe_branches
from workers.runs.html import COMPLETION_COLUMNS, completion_cells, group_html, html_details, html_table
from workers.runs.transcript import describe_reward, invalid_reason, paragraphs

UNFINISHED: Final = "unfinished"
"""Stands for the outcome of a group that has none yet."""
EVALUATED: Final = "evaluated"
"""Stands for the outcome of a group of an evaluation, which is never trained."""


class CompletionView(Struct, frozen=True, kw_only=True):
    """One completion of a run, with what is known about its group."""

    group: Group
    completion: Completion
    outcome: str
    """The outcome of the group: `trained`, `dropped:REASON`, `unfinished`, or `evaluated`."""
    step: int | None = None
    """The step that ended the group, or whose weights were evaluated; None if it is unfinished."""
    trained: TrainedCompletion | None = None
    """What the training step did with the completion; None if it was in no step, or if that was not archived."""
    record: LedgerRecord | None = None
    """The ledger's record of the group; None if it is unfinished or evaluated."""

    def __repr__(self) -> str:
        name = f"{self.group.prompt.id!r}, completion {self.completion.index}"
        return f"CompletionView({name}, {self.outcome}, reward {describe_reward(self.completion.reward)})"

    def _repr_html_(self) -> str:
        return completions_html([self])

    def text(self) -> str:
        """Return a text of the conversation, the reward, the episode's end, and what the training step did."""
        labelled_texts = paragraphs(self.completion, outcome=self.outcome, trained=self.trained)
        return "\n".join(f"{label}: {escape_controls(text)}" for label, text in labelled_texts)

    @property
    def reward(self) -> float | None:
        """The reward; None if it was not measured."""
        return self.completion.reward.value if isinstance(self.completion.reward, Measured) else None

    @property
    def branches(self) -> list[BranchView]:
        """The branches of an agent's conversation, each followed by those that come from it; empty: a single line."""
        return describe_branches(self.completion, self.trained)

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions that sampled the completion, ascending."""
        return tuple(sorted({span.version for row in self.completion.rows for span in row.spans}))

    @property
    def end(self) -> str:
        """How the episode ended: `finished`, why it was truncated, or `failed`."""
        return episode_end(self.completion.failure, self.completion.truncated)

    @property
    def labels(self) -> frozenset[str]:
        """The words by which a filter finds the completion."""
        return completion_labels(
            self.completion.failure, self.completion.truncated, self.completion.reward, self.outcome
        )

    @property
    def why_invalid(self) -> str:
        """Why the completion is invalid; empty if it is valid."""
        return invalid_reason(self.completion)

    def describe(self) -> dict[str, Any]:
        """Return what `--json` and the exports say about the completion, without its tokens and messages."""
        group, completion, trained = self.group, self.completion, self.trained
        return {
            "prompt_id": group.prompt.id,
            "completion": completion.index,
            "greedy": completion.greedy,
            "environment": group.prompt.environment,
            "epoch": group.prompt.epoch,
            "row": group.prompt.row,
            "step": self.step,
            "outcome": self.outcome,
            "versions": list(self.versions),
            "end": self.end,
            "why_invalid": self.why_invalid or None,
            "state": trained.state if trained else None,
            "reward": self.reward,
            "advantage": trained.advantage if trained else None,
            "loss_tokens": trained.loss_tokens if trained else None,
            "turns": completion.turns,
            "tool_calls": completion.tool_calls,
            "tool_errors": completion.tool_errors,
            "sampled_tokens": sum(row.sampled_count for row in completion.rows),
            "branches": [branch.describe() for branch in self.branches],
            "worker": group.worker,
            "sampled_at": group.rolled_out_at,
        }


class RunGroup(Struct, frozen=True):
    """One group of a run: its completions, which all answer the same prompt."""

    completions: list[CompletionView]
    """All completions of the group; there is at least one."""

    def __repr__(self) -> str:
        first, mean = self.completions[0], self.reward_mean
        reward = "unmeasured" if mean is None else f"{mean:g}"
        return f"RunGroup({first.group.prompt.id!r}, {first.outcome}, reward {reward})"

    def _repr_html_(self) -> str:
        return group_html(self.completions[0].group, self.completions[0].outcome)

    @property
    def reward_mean(self) -> float | None:
        """The mean of the measured rewards; None if no reward was measured."""
        rewards = [view.reward for view in self.completions if view.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def describe(self) -> dict[str, Any]:
        """Return what `--json` says about the group, without its tokens and messages."""
        first = self.completions[0]
        return {
            "prompt_id": first.group.prompt.id,
            "environment": first.group.prompt.environment,
            "outcome": first.outcome,
            "step": first.step,
            "versions": sorted({version for each in self.completions for version in each.versions}),
            "completions": len(self.completions),
            "valid": sum(not each.why_invalid for each in self.completions),
            "ends": [each.end for each in self.completions],
            "rewards": [each.reward for each in self.completions],
            "reward_mean": self.reward_mean,
            "attempt": first.group.attempt,
            "worker": first.group.worker,
            "sampled_at": first.group.rolled_out_at,
        }


def episode_end(failure: Failure | None, truncated: TruncationReason | None) -> str:
    """Return how an episode ended: `finished`, why it was truncated, or `failed`."""
    return "failed" if failure is not None else str(truncated or "finished")


def completion_labels(
    failure: Failure | None, truncated: TruncationReason | None, reward: Reward | None, outcome: str
) -> frozenset[str]:
    """Return the words by which `--end`, and the filter of the dashboard, find a completion.

    These are its end (`finished`, `failed`, `truncated` and why), `valid` or `invalid` and why (`failed:REASON`,
    `reward:REASON`), and the outcome of its group (`trained`, `dropped` and `dropped:REASON`, `unfinished`).
    """
    reason = f"reward:{reward.reason}" if reward is not None and reward.reason else ""
    if failure is not None:
        return _labels("failed", f"failed:{failure.reason}", reason, outcome)
    # A measured reward may have a reason, too: an answer that could not be judged gets the worst reward, and is valid.
    is_valid = reward is None or isinstance(reward, Measured)
    return _labels(episode_end(failure, truncated), "" if is_valid else reason, reason, outcome)


@lru_cache(maxsize=4096)
def _labels(end: str, why_invalid: str, reason: str, outcome: str) -> frozenset[str]:
    """Return the labels; completions with the same labels share one set, to save memory."""
    words = {end, outcome, reason, *((why_invalid, "invalid") if why_invalid else ("valid",))}
    if end not in ("finished", "failed"):
        words.add("truncated")
    if outcome.startswith("dropped:"):
        words.add("dropped")
    return frozenset(words - {""})


def completions_html(views: Sequence[CompletionView]) -> str:
    """Return completions as a table, and below it each conversation, hidden until the reader clicks it."""
    rows = [(each.group.prompt.id, each.outcome, each.step, *completion_cells(each.completion)) for each in views]
    table = html_table("", ("prompt", "outcome", "step", *COMPLETION_COLUMNS), rows)
    titles = [f"{each.group.prompt.id}, completion {each.completion.index}" for each in views]
    return table + "".join(html_details(title, each.text()) for title, each in zip(titles, views, strict=True))


def groups_html(groups: Iterable[RunGroup]) -> str:
    """Return groups as a table with one line for each."""
    names = ("prompt_id", "environment", "outcome", "step", "reward_mean", "valid", "completions", "ends")
    described = [group.describe() for group in groups]
    return html_table("", [name.replace("_", " ") for name in names], [[row[n] for n in names] for row in described])


def unfinished_views(group: Group) -> list[CompletionView]:
    """Return the completions of a group without an outcome."""
    return [CompletionView(group=group, completion=each, outcome=UNFINISHED) for each in group.completions]


def evaluated_group(group: Group, step: int) -> RunGroup:
    """Return a group of the evaluation of this step's weights."""
    return RunGroup(
        [CompletionView(group=group, completion=each, outcome=EVALUATED, step=step) for each in group.completions]
    )


class ArchivedRunGroups:
    """The groups that a run's ledger names, in its order, and their places in the archive. Blocks: use it in a thread.

    A group's number is its position in `records`, and never changes. Only those parts of the archive are read that a
    caller asks for: the positions in one segment, or one group.

    Args:
        folder: the run's folder.
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
        """The last record of each prompt that ended without a group, as a dead letter does."""
        self._last_trained: tuple[LedgerRecord, Sequence[TrainedCompletion]] | None = None
        """The group whose trained tokens were read last, and what was read."""
        self.damaged: list[str] = []
        """Messages about groups that `completions` could not read."""
        self._without_ledger = not self._ledger.exists()
        if self._without_ledger:  # the run was killed as its first group ended, or no group has ended
            records = {(record.prompt, record.hash): record for record, _ in scan_archive(folder / "groups")}
            self._add(records.values())
        self.refresh()

    def __len__(self) -> int:
        """Return the number of groups that the archive still has."""
        return sum(1 for _ in self.numbers())

    @property
    def records(self) -> Sequence[LedgerRecord]:
        """The ledger's records of all groups, including those that the archive does not have any more."""
        return self._records

    @property
    def missing(self) -> int:
        """Number of groups of the ledger that the archive does not have any more."""
        return len(self._records) - len(self)

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step of which the archive has a group; None if it has no group."""
        archived = [self._records[number].step for number in self.numbers()]
        return (archived[0], archived[-1]) if archived else None

    def refresh(self) -> bool:
        """Read what was added to ledger and archive since the last call.

        Returns:
            False if the ledger was cut, as when a run resumes from a checkpoint, or if there was no ledger before.
            The groups then stay as they were, also after later calls: make a new object.
        """
        with self._lock:
            records, is_cut = self._ledger.read_new()
            self._is_outdated |= is_cut or (self._without_ledger and self._ledger.exists())
            if self._is_outdated:
                return False
            self._archive.refresh()  # after the ledger: the archive already has every group that the ledger names
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

    def trained_tokens(self, number: int) -> list[TrainedCompletion] | None:
        """Return what the trainer did with each completion that is not greedy, and with its tokens; None if unknown."""
        return read_trained_tokens(self._folder, self._records[number])

    def groups(self, steps: Container[int] | None = None, *, newest_first: bool = True) -> Iterator[RunGroup]:
        """Yield the groups of these steps (None: of all) that can be read; damaged ones are added to `damaged`."""
        numbers = range(len(self._records))
        for number in reversed(numbers) if newest_first else numbers:
            if (steps is None or self._records[number].step in steps) and self._find(number) is not None:
                views = list(self._completions_of(number))
                if views:
                    yield RunGroup(views)

    def completions(self, steps: Container[int] | None = None) -> Iterator[CompletionView]:
        """Yield the completions of the groups that `groups` yields, in the order of the ledger."""
        return (view for group in self.groups(steps, newest_first=False) for view in group.completions)

    def with_trained_tokens(self, view: CompletionView) -> CompletionView:
        """Return a completion with what the step did with each of its tokens, if that is recorded."""
        if view.record is None or view.trained is None:
            return view
        if self._last_trained is None or self._last_trained[0] is not view.record:
            self._last_trained = view.record, read_trained_tokens(self._folder, view.record) or []
        completions = [each for each in view.group.completions if not each.greedy]
        position = next(at for at, each in enumerate(completions) if each is view.completion)
        trained = self._last_trained[1]
        return structs.replace(view, trained=trained[position]) if position < len(trained) else view

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

    def _completions_of(self, number: int) -> Iterator[CompletionView]:
        record, offset = self._records[number], self.locate(number)
        try:
            group, trained_completions = self.read(number)
        except (RecordError, PenstockError) as error:
            self.damaged.append(f"{offset.file.name}, byte {offset.offset}: {error}")
            return
        trained = iter(trained_completions)
        for completion in group.completions:
            yield CompletionView(
                group=group,
                completion=completion,
                outcome=encode_outcome(record.outcome),
                step=record.step,
                trained=None if completion.greedy else next(trained, None),
                record=record,
            )
