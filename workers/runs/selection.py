"""Which completions of a run are wanted: the one filter, and an order of which the first few are kept.

The options of commands, the address of a page and keywords in Python are the same words: `step`, `version`, `reward`,
`end`, `prompt`, `invalid`.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, Literal, TypedDict, TypeVar, Unpack

from msgspec import Struct

from stream.errors import SettingsError
from stream.records import Message
from stream.validity import TruncationReason
from workers.runs.groups import (
    UNFINISHED,
    ArchivedRunGroups,
    CompletionView,
    RunGroup,
    completions_html,
    groups_html,
)
from workers.runs.html import html_table
from workers.runs.transcript import content_text

T = TypeVar("T")

Order = Literal["newest", "best", "worst", "random"]
_ENDS: Final = ("finished", "failed", "truncated", *TruncationReason, "valid", "invalid")
_OUTCOMES: Final = ("trained", "dropped", UNFINISHED)


class Conditions(TypedDict, total=False):
    """What a filter is made of; empty ones are no condition."""

    step: str
    """Range of the step that ended the group: `N`, `N..M`, `N..` or `..M`."""
    version: str
    """Range of a policy version that sampled the completion."""
    reward: str
    """Range of a measured reward."""
    end: str | Sequence[str]
    """How the episode ended, why it is invalid, or the group's outcome; of several, one holds."""
    prompt: str
    """Id of the prompt, or a part of its text."""
    invalid: bool
    """Only invalid completions."""


class NumberRange(Struct, frozen=True):
    """A closed range of numbers."""

    low: float = -math.inf
    high: float = math.inf

    @classmethod
    def parse(cls, text: str, option: str) -> "NumberRange":
        """Parse `3`, `3..7`, `3..` or `..7`.

        Raises:
            SettingsError: the text is no range.
        """
        low, dots, high = text.partition("..")
        try:
            found = cls(float(low or -math.inf), float((high if dots else low) or math.inf))
        except ValueError:
            found = None
        if found is None or not text.strip(".") or math.isnan(found.low + found.high) or found.low > found.high:
            raise SettingsError(f"{option} {text}: write a number or a range, such as 3, 3..7, 3.. or ..7")
        return found

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:g}"
        return (
            f"{'' if self.low == -math.inf else f'{self.low:g}'}..{'' if self.high == math.inf else f'{self.high:g}'}"
        )

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


class CompletionFilter(Struct, frozen=True, kw_only=True):
    """Conditions that all hold for a completion; None and empty: no condition."""

    steps: NumberRange | None = None
    versions: NumberRange | None = None
    rewards: NumberRange | None = None
    ends: tuple[str, ...] = ()
    prompt: str = ""
    invalid: bool = False

    @classmethod
    def parse(cls, **conditions: Unpack[Conditions]) -> "CompletionFilter":
        """Make a filter of texts.

        Raises:
            SettingsError: one of them has no valid value.
        """
        end = conditions.get("end", ())
        ends = tuple(word for word in ((end,) if isinstance(end, str) else end) if word)
        for word in ends:
            if word not in (*_ENDS, *_OUTCOMES) and not word.startswith(("dropped:", "failed:", "reward:")):
                raise SettingsError(
                    f"end {word}: write {', '.join(map(str, (*_ENDS, *_OUTCOMES)))}, or dropped:REASON, "
                    "failed:REASON, reward:REASON"
                )
        return cls(
            steps=_parse_range("step", conditions.get("step", "")),
            versions=_parse_range("version", conditions.get("version", "")),
            rewards=_parse_range("reward", conditions.get("reward", "")),
            ends=ends,
            prompt=conditions.get("prompt", ""),
            invalid=conditions.get("invalid", False),
        )

    def __str__(self) -> str:
        options = {"step": self.steps, "version": self.versions, "reward": self.rewards, "prompt": self.prompt}
        named = [f"{name} {value}" for name, value in options.items() if value]
        return " and ".join([*named, *(f"end {end}" for end in self.ends), *(["invalid"] if self.invalid else [])])

    @property
    def has_completion_conditions(self) -> bool:
        """Whether completions of one group can differ in whether they match."""
        return bool(self.versions or self.rewards or self.ends or self.invalid)

    def matches(self, view: CompletionView) -> bool:
        """Whether all conditions hold for a completion."""
        return (
            self.has_step(view.step)
            and self.matches_completion(view.reward, view.versions, view.labels)
            and (not self.prompt or self.has_text(view.group.prompt.id, _prompt_text(view)))
        )

    def matches_group(self, group: RunGroup) -> bool:
        """Whether all conditions hold for one of the group's completions."""
        return any(map(self.matches, group.completions))

    def has_step(self, step: int | None) -> bool:
        """Whether this is one of the steps."""
        return self.steps is None or step in self.steps

    def has_text(self, prompt_id: str, text: str) -> bool:
        """Whether this is the prompt, or a prompt with the text that is searched."""
        return not self.prompt or self.prompt == prompt_id or self.prompt in text

    def matches_completion(self, reward: float | None, versions: Iterable[int], labels: frozenset[str]) -> bool:
        """Whether the conditions on the completion itself hold.

        Args:
            reward: its reward; None: not measured.
            versions: that sampled it.
            labels: its words (`completion_labels`).
        """
        return (
            (self.rewards is None or reward in self.rewards)
            and (not self.ends or not labels.isdisjoint(self.ends))
            and (not self.invalid or "invalid" in labels)
            and (self.versions is None or any(version in self.versions for version in versions))
        )


class Selection:
    """Keeps the first `count` completions of an order among those offered, in bounded memory.

    Args:
        order: `newest` keeps those offered first; `best` and `worst` leave out rewards that are not measured.
        count: how many.
        seed: of the order `random`.
    """

    def __init__(self, order: Order, count: int, seed: int = 0) -> None:
        self.offered = 0
        self._order, self._count = order, count
        self._random = random.Random(seed)
        self._kept: list[tuple[float, int, CompletionView]] = []
        """A heap of rank, number, completion; the lowest rank goes first."""

    @property
    def is_complete(self) -> bool:
        """Whether no later completion can be chosen."""
        return self._order == "newest" and len(self._kept) == self._count

    def offer(self, view: CompletionView) -> None:
        """Keep the completion if it is among the first."""
        rank = self._rank(view)
        if rank is None:
            return
        self.offered += 1
        entry = (rank, -self.offered, view)
        if len(self._kept) < self._count:
            heapq.heappush(self._kept, entry)
        elif entry[:2] > self._kept[0][:2]:
            heapq.heapreplace(self._kept, entry)

    def result(self) -> list[CompletionView]:
        """Return what was kept, the first of the order first."""
        return [view for _, _, view in sorted(self._kept, key=lambda entry: entry[:2], reverse=True)]

    def _rank(self, view: CompletionView) -> float | None:
        ranks: dict[Order, Callable[[], float | None]] = {
            "newest": lambda: 0.0,
            "random": self._random.random,
            "best": lambda: view.reward,
            "worst": lambda: None if view.reward is None else -view.reward,
        }
        return ranks[self._order]()


class Matches(Generic[T]):
    """What a search in a run found; a sequence.

    Args:
        items: groups or completions.
        archived: all groups in the run's archive.
        wanted: the filter.
        notes: what could not be read.
        offered: how many matched, of which `items` are some; 0: not all were looked at.
    """

    def __init__(
        self,
        items: list[T],
        archived: ArchivedRunGroups,
        wanted: CompletionFilter,
        notes: list[str],
        offered: int = 0,
    ) -> None:
        self.items, self.archived, self.wanted, self.notes, self.offered = items, archived, wanted, notes, offered

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __getitem__(self, position: int) -> T:
        return self.items[position]

    def __repr__(self) -> str:
        return repr(self.items)

    def _repr_html_(self) -> str:
        if not self.items:
            return html_table(self.why_empty(), (), ())
        groups = [item for item in self.items if isinstance(item, RunGroup)]
        views = [item for item in self.items if isinstance(item, CompletionView)]
        found = groups_html(groups) if groups else completions_html(views)
        return found + html_table("; ".join(self.notes), (), ()) * bool(self.notes)

    def why_empty(self) -> str:
        """Return why nothing matches, as a sentence."""
        if why := self.archived.why_none(self.wanted.prompt):
            return f"{why} `penstock dead list` shows dead letters with their errors"
        which = f" that matches {self.wanted}" if str(self.wanted) else " yet"
        steps = self.archived.steps
        of = f" of steps {steps[0]} to {steps[1]}" if steps else ""
        return f"no completion{which}; its archive has {len(self.archived):,} groups{of}"


def prompt_text(messages: Iterable[Message]) -> str:
    """Return the text of a prompt, from the last message to the first."""
    return "\n".join(content_text(message.get("content")) for message in reversed([*messages]))


def _prompt_text(view: CompletionView) -> str:
    return prompt_text(view.completion.prompt_messages or view.group.prompt.messages)


def _parse_range(name: str, text: str) -> NumberRange | None:
    return NumberRange.parse(text, name) if text else None
