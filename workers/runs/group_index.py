"""An index of a run's archived groups: a summary of each, read once and kept as long as the index.

A summary is read from the whole archived group, so only when it is needed: a page of the newest groups reads one
segment of the archive, however many segments there are. Everything here blocks on files: call it in a thread.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Final

from msgspec import Struct, structs

from stream.codec import decode
from stream.errors import PenstockError, RecordError
from stream.records import Failure, Group, Message, Span
from stream.trainer.ledger_records import encode_outcome
from stream.validity import Measured, Reward, TruncationReason
from workers.runs.groups import ArchivedRunGroups, completion_labels
from workers.runs.phases import GroupTimes
from workers.runs.selection import CompletionFilter, prompt_text

_TEXT_CHARACTERS: Final = 500
"""Length to which a summary cuts a prompt's text; a search reads a longer prompt again from the archive."""
_GENERAL: Final = frozenset({"valid", "invalid", "truncated", "dropped"})
"""Labels that are not counted, because more specific labels of the same completions are."""


class GroupSummary(Struct, frozen=True, kw_only=True, gc=False):
    """What lists and filters need of a group; tuples have one value for each completion."""

    number: int
    """Position in the ledger's order, from 0; it does not change while the run goes on."""
    prompt: str
    environment: str
    outcome: str
    """`trained` or `dropped:REASON`."""
    step: int
    rewards: tuple[float | None, ...]
    """None: not measured."""
    labels: tuple[frozenset[str], ...]
    """The words by which a filter finds each completion."""
    versions: tuple[tuple[int, ...], ...]
    """The policy versions that sampled each completion, ascending."""
    sampled_tokens: int
    turns: int
    """Number of turns of the completion that has the most."""
    times: GroupTimes
    text: str
    """The beginning of the last user message of the prompt."""
    is_whole: bool
    """Whether `text` is all of the prompt's text."""

    @property
    def measured(self) -> list[float]:
        """The measured rewards."""
        return [reward for reward in self.rewards if reward is not None]

    @property
    def mean_reward(self) -> float | None:
        """Mean of the measured rewards; None if no reward was measured."""
        measured = self.measured
        return sum(measured) / len(measured) if measured else None

    @property
    def invalid(self) -> int:
        """Number of invalid completions."""
        return sum("invalid" in labels for labels in self.labels)

    @property
    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that sampled a token; None if no token was sampled."""
        versions = [version for completion in self.versions for version in completion]
        return (min(versions), max(versions)) if versions else None

    def matches(self, wanted: CompletionFilter) -> bool:
        """Whether a completion of the group meets all conditions of the filter, except the condition on the prompt."""
        if not wanted.has_step(self.step):
            return False
        return not wanted.has_completion_conditions or any(self._matching(wanted))

    def matching_rewards(self, wanted: CompletionFilter) -> list[float]:
        """Return the measured rewards of those completions that meet the filter's conditions on a completion."""
        pairs = zip(self.rewards, self._matching(wanted), strict=True)
        return [reward for reward, is_matching in pairs if is_matching and reward is not None]

    def _matching(self, wanted: CompletionFilter) -> Iterator[bool]:
        """Yield for each completion whether it meets the filter's conditions on a completion."""
        return map(wanted.matches_completion, self.rewards, self.versions, self.labels)


class SearchResult(Struct, frozen=True, kw_only=True):
    """Groups that a search found, the newest first."""

    groups: list[GroupSummary]
    next_before: int | None
    """Argument `before` of the search that continues this one; None: everything was searched."""
    is_interrupted: bool
    """The time was over before `count` groups were found."""


class GroupIndex:
    """Summaries of the archived groups of one run. A group's number is that of `ArchivedRunGroups`.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.groups = ArchivedRunGroups(folder)
        self._lock = Lock()
        self._summaries: list[GroupSummary | None] = [None] * len(self.groups.records)
        self._unreadable: set[int] = set()
        """Numbers of groups that are not in the archive (any more), or damaged."""

    def __len__(self) -> int:
        return len(self._summaries)

    @property
    def unread(self) -> int:
        """Number of groups whose summary was not read yet."""
        return self._summaries.count(None) - len(self._unreadable)

    @property
    def unreadable(self) -> int:
        """Number of groups that are not in the archive any more, or damaged, as far as read."""
        return len(self._unreadable)

    def refresh(self) -> bool:
        """Add the groups that ended since the last call. False: make a new index (see `ArchivedRunGroups.refresh`)."""
        with self._lock:
            is_valid = self.groups.refresh()
            self._summaries += [None] * (len(self.groups.records) - len(self._summaries))
            return is_valid

    def summary(self, number: int) -> GroupSummary | None:
        """Return the summary of one group; None if it cannot be read any more."""
        summary = self._summaries[number]
        if summary is None and number not in self._unreadable:
            try:
                group = decode(self.groups.locate(number).read_payload(), _Group)
            except (RecordError, PenstockError):
                self._unreadable.add(number)
                return None
            record = self.groups.records[number]
            summary = summarize_group(number, encode_outcome(record.outcome), record.step, group)
            self._summaries[number] = summary
        return summary

    def read_more(self, seconds: float) -> bool:
        """Read missing summaries for at most `seconds`, the newest first. Returns whether all are read."""
        deadline = time.monotonic() + seconds
        for number in range(len(self._summaries) - 1, -1, -1):
            if self._summaries[number] is None and number not in self._unreadable:
                self.summary(number)
                if time.monotonic() > deadline:
                    return False
        return True

    def search(self, wanted: CompletionFilter, before: int | None, count: int, seconds: float) -> SearchResult:
        """Return the newest groups that match, as far as they are found within the given time.

        Args:
            wanted: the conditions.
            before: search among older groups than the one with this number; None: among all.
            count: maximum number of groups to return.
            seconds: time for the search; `SearchResult.next_before` continues it.
        """
        deadline = time.monotonic() + seconds
        groups: list[GroupSummary] = []
        number = min(before if before is not None else len(self._summaries), len(self._summaries))
        while number > 0:
            if len(groups) == count or time.monotonic() > deadline:
                return SearchResult(groups=groups, next_before=number, is_interrupted=len(groups) < count)
            number -= 1
            if not wanted.has_step(self.groups.records[number].step):
                continue
            group = self.summary(number)
            if group is not None and group.matches(wanted) and self._has_text(group, wanted):
                groups.append(group)
        return SearchResult(groups=groups, next_before=None, is_interrupted=False)

    def rewards(self, wanted: CompletionFilter) -> list[float]:
        """Return the rewards of all completions that match, whatever their reward, in groups whose summary was read."""
        wanted = structs.replace(wanted, rewards=None)
        return [
            reward
            for group in self._known_summaries()
            if wanted.has_step(group.step) and self._has_text(group, wanted)
            for reward in group.matching_rewards(wanted)
        ]

    def counts(self) -> dict[str, int]:
        """Return how many groups have each label, as their outcome or in a completion, in summaries that were read."""
        counts = Counter(
            label
            for group in self._known_summaries()
            for label in frozenset().union({group.outcome}, *group.labels) - _GENERAL
        )
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def _known_summaries(self) -> list[GroupSummary]:
        return [summary for summary in self._summaries if summary is not None]

    def _has_text(self, group: GroupSummary, wanted: CompletionFilter) -> bool:
        if wanted.has_text(group.prompt, group.text) or group.is_whole:
            return wanted.has_text(group.prompt, group.text)
        try:
            payload = self.groups.locate(group.number).read_payload()
            return wanted.has_text(group.prompt, _prompt_text(decode(payload, _Group)))
        except (RecordError, PenstockError):
            return False


class _Prompt(Struct):
    id: str
    messages: list[Message] = []
    environment: str | None = None
    fed_at: float = 0.0


class _Row(Struct):
    sampled_ranges: list[tuple[int, int]] = []
    spans: list[Span] = []


class _Completion(Struct):
    prompt_messages: list[Message] = []
    rows: list[_Row] = []
    failure: Failure | None = None
    truncated: TruncationReason | None = None
    reward: Reward | None = None
    turns: int = 0


class _Group(Struct):
    """The parts of a group that a summary is made of; tokens, log-probs and answers are skipped."""

    prompt: _Prompt
    completions: list[_Completion] = []
    claimed_at: float = 0.0
    rolled_out_at: float = 0.0
    score_claimed_at: float = 0.0
    scored_at: float = 0.0


def summarize_group(number: int, outcome: str, step: int, group: "_Group | Group") -> GroupSummary:
    """Return the summary of a group, whether it is in the archive or not."""
    completions = group.completions
    versions = [
        tuple(sorted({span.version for row in completion.rows for span in row.spans})) for completion in completions
    ]
    shared = {numbers: numbers for numbers in versions}  # most completions of a group have the same: one tuple serves
    text = _prompt_text(group)
    ranges = [bounds for completion in completions for row in completion.rows for bounds in row.sampled_ranges]
    return GroupSummary(
        number=number,
        prompt=group.prompt.id,
        environment=sys.intern(group.prompt.environment or ""),
        outcome=sys.intern(outcome),
        step=step,
        rewards=tuple(
            completion.reward.value if isinstance(completion.reward, Measured) else None for completion in completions
        ),
        labels=tuple(
            completion_labels(completion.failure, completion.truncated, completion.reward, outcome)
            for completion in completions
        ),
        versions=tuple(shared[numbers] for numbers in versions),
        sampled_tokens=sum(end - start for start, end in ranges),
        turns=max((completion.turns for completion in completions), default=0),
        times=GroupTimes(
            group.prompt.fed_at, group.claimed_at, group.rolled_out_at, group.score_claimed_at, group.scored_at
        ),
        text=text[:_TEXT_CHARACTERS],
        is_whole=len(text) <= _TEXT_CHARACTERS,
    )


def _prompt_text(group: "_Group | Group") -> str:
    """Return the prompt's text as the first completion saw it."""
    return prompt_text((group.completions[0].prompt_messages if group.completions else []) or group.prompt.messages)
