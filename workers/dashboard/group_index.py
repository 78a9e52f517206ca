"""An index of a run's archived groups: a summary of each, read once and kept while the dashboard runs.

A summary needs the group's payload, so it is read when a page needs it: a page of the newest groups reads one segment
of the archive, however many there are. Everything here blocks on files: call it in a thread.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Final

from msgspec import Struct

from stream.codec import decode
from stream.errors import PenstockError, RecordError
from stream.records import Failure, Group, Message, Span
from stream.trainer.ledger_records import LedgerRecord
from stream.trainer.outcomes import encode_outcome
from stream.validity import Measured, Reward, TruncationReason
from workers.commands.transcripts.run_completions import invalid_code
from workers.commands.transcripts.selection import Interval, end_names
from workers.runs.groups import ArchivedRunGroups, episode_end
from workers.runs.transcript import content_text

_TEXT_CHARACTERS: Final = 500
"""Of a prompt, in a summary. A longer prompt is read again when its text is searched."""


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
    ends: tuple[str, ...]
    """How each episode ended: `finished`, why it was truncated, or `failed`."""
    reasons: tuple[str, ...]
    """Why each completion is invalid: `failed:REASON` or `reward:REASON`; empty: it is valid."""
    versions: tuple[int, int]
    """Oldest and newest policy version that sampled a token; -1 for none."""
    sampled_tokens: int
    turns: int
    """Of the completion with the most."""
    times: tuple[float, float, float, float]
    """When it was fed, claimed, rolled out and scored, as Unix times in seconds; 0 if that is not known."""
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
        """Mean of the measured rewards; None without any."""
        measured = self.measured
        return sum(measured) / len(measured) if measured else None

    @property
    def invalid(self) -> int:
        """Number of invalid completions."""
        return sum(1 for reason in self.reasons if reason)


class GroupFilter(Struct, frozen=True, kw_only=True):
    """Conditions that all hold for a group, those on completions for one and the same completion of it."""

    steps: Interval | None = None
    versions: Interval | None = None
    rewards: Interval | None = None
    end: str = ""
    """`valid`, `invalid`, how the episode ended, `failed:REASON`, `reward:REASON`, or an outcome of the group."""
    prompt: str = ""
    """Id of the prompt, or a part of its text."""

    def matches(self, group: GroupSummary, *, without_reward: bool = False) -> bool:
        """Whether the group has a completion that meets the conditions; the prompt's text is checked separately."""
        low, high = group.versions
        if self.steps is not None and group.step not in self.steps:
            return False
        if self.versions is not None and (high < self.versions.low or low > self.versions.high):
            return False
        rewards = None if without_reward else self.rewards
        if rewards is None and not self.end:
            return True
        return any(
            (rewards is None or reward in rewards) and (not self.end or self._has_end(group, end, reason))
            for reward, end, reason in zip(group.rewards, group.ends, group.reasons, strict=True)
        )

    def has_text(self, group: GroupSummary) -> bool:
        """Whether the group is of the prompt, or the beginning of its text contains what is searched."""
        return not self.prompt or self.prompt == group.prompt or self.prompt in group.text

    def matching_rewards(self, group: GroupSummary) -> list[float]:
        """Return the measured rewards of completions that meet all conditions but the one on the reward."""
        return [
            reward
            for reward, end, reason in zip(group.rewards, group.ends, group.reasons, strict=True)
            if reward is not None and (not self.end or self._has_end(group, end, reason))
        ]

    def _has_end(self, group: GroupSummary, end: str, reason: str) -> bool:
        return self.end in end_names(end, reason, group.outcome)


class SearchResult(Struct, frozen=True, kw_only=True):
    """Groups that a search found, the newest first."""

    groups: list[GroupSummary]
    next_before: int | None
    """Search on from here; None: there is no more."""
    is_interrupted: bool
    """The time was up before the page was full."""


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
        """Number of groups without a summary so far."""
        return self._summaries.count(None) - len(self._unreadable)

    @property
    def unreadable(self) -> int:
        """Number of groups that are not in the archive any more, or damaged, as far as read."""
        return len(self._unreadable)

    def refresh(self) -> bool:
        """Learn of the groups that ended since the last call. False: a new index is needed (`ArchivedRunGroups`)."""
        with self._lock:
            is_valid = self.groups.refresh()
            self._summaries += [None] * (len(self.groups.records) - len(self._summaries))
            return is_valid

    def summary(self, number: int) -> GroupSummary | None:
        """Return the summary of one group; None if it cannot be read any more."""
        known = self._summaries[number]
        if known is None and number not in self._unreadable:
            try:
                group = decode(self.groups.locate(number).read_payload(), _Group)
            except (RecordError, PenstockError):
                self._unreadable.add(number)
                return None
            known = self._summaries[number] = _summarize(number, self.groups.records[number], group)
        return known

    def read_more(self, seconds: float) -> bool:
        """Read summaries for some time, the newest first. Returns whether all are read."""
        deadline = time.monotonic() + seconds
        for number in self._newest_first():
            if self._summaries[number] is None and number not in self._unreadable:
                self.summary(number)
                if time.monotonic() > deadline:
                    return False
        return True

    def search(self, wanted: GroupFilter, before: int | None, count: int, seconds: float) -> SearchResult:
        """Return the newest groups that match, searching for at most some time.

        Args:
            wanted: the conditions.
            before: search among older groups than the one with this number; None: among all.
            count: the most groups to return.
            seconds: time for the search; what it did not reach is searched by the next one.
        """
        deadline = time.monotonic() + seconds
        groups: list[GroupSummary] = []
        number = min(before if before is not None else len(self._summaries), len(self._summaries))
        while number > 0:
            if len(groups) == count or time.monotonic() > deadline:
                return SearchResult(groups=groups, next_before=number, is_interrupted=len(groups) < count)
            number -= 1
            if wanted.steps is not None and self.groups.records[number].step not in wanted.steps:
                continue
            found = self.summary(number)
            if found is not None and wanted.matches(found) and self._has_text(found, wanted):
                groups.append(found)
        return SearchResult(groups=groups, next_before=None, is_interrupted=False)

    def rewards(self, wanted: GroupFilter) -> list[float]:
        """Return the rewards of all completions that match, without the condition on the reward, as far as read."""
        return [
            reward
            for group in self._known()
            if wanted.matches(group, without_reward=True) and self._has_text(group, wanted)
            for reward in wanted.matching_rewards(group)
        ]

    def counts(self) -> dict[str, int]:
        """Return how many groups have each outcome, and each reason of an invalid completion, as far as read."""
        found: dict[str, int] = {}
        for group in self._known():
            for name in {group.outcome, *group.reasons, *group.ends} - {""}:
                found[name] = found.get(name, 0) + 1
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def _newest_first(self) -> Iterator[int]:
        return iter(range(len(self._summaries) - 1, -1, -1))

    def _known(self) -> list[GroupSummary]:
        return [summary for summary in self._summaries if summary is not None]

    def _has_text(self, group: GroupSummary, wanted: GroupFilter) -> bool:
        if wanted.has_text(group) or group.is_whole:
            return wanted.has_text(group)
        try:
            payload = self.groups.locate(group.number).read_payload()
            return wanted.prompt in _prompt_text(decode(payload, _Group))
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
    scored_at: float = 0.0


def summarize_group(number: int, outcome: str, step: int, group: Group) -> GroupSummary:
    """Return the summary of a group that is not in the archive."""
    return _summarize_fields(number, outcome, step, group)


def _summarize(number: int, record: LedgerRecord, group: _Group) -> GroupSummary:
    return _summarize_fields(number, encode_outcome(record.outcome), record.step, group)


def _summarize_fields(number: int, outcome: str, step: int, group: "_Group | Group") -> GroupSummary:
    completions = group.completions
    versions = [span.version for each in completions for row in each.rows for span in row.spans]
    text = _prompt_text(group)
    ranges = [bounds for each in completions for row in each.rows for bounds in row.sampled_ranges]
    return GroupSummary(
        number=number,
        prompt=group.prompt.id,
        environment=sys.intern(group.prompt.environment or ""),
        outcome=sys.intern(outcome),
        step=step,
        rewards=tuple(each.reward.value if isinstance(each.reward, Measured) else None for each in completions),
        ends=tuple(sys.intern(episode_end(each.failure, each.truncated)) for each in completions),
        reasons=tuple(sys.intern(invalid_code(each.failure, each.reward)) for each in completions),
        versions=(min(versions, default=-1), max(versions, default=-1)),
        sampled_tokens=sum(end - start for start, end in ranges),
        turns=max((each.turns for each in completions), default=0),
        times=(group.prompt.fed_at, group.claimed_at, group.rolled_out_at, group.scored_at),
        text=text[:_TEXT_CHARACTERS],
        is_whole=len(text) <= _TEXT_CHARACTERS,
    )


def _prompt_text(group: "_Group | Group") -> str:
    """Return the prompt's text as the first completion saw it, from the last message to the first."""
    messages = (group.completions[0].prompt_messages if group.completions else []) or group.prompt.messages
    return "\n".join(content_text(message.get("content")) for message in reversed(messages))
