"""Which completions a command reads: filters, and an order of which the first few are kept."""

import heapq
import math
import random
from collections.abc import Callable
from typing import Final, Literal

from msgspec import Struct

from stream.errors import SettingsError
from stream.validity import TruncationReason
from workers.commands.transcripts.run_completions import RunCompletion
from workers.runs.groups import UNFINISHED
from workers.runs.transcript import content_text

Order = Literal["newest", "best", "worst", "random"]
_ENDS: Final = ("finished", "failed", "truncated", *TruncationReason, "valid", "invalid")
_OUTCOMES: Final = ("trained", "dropped", UNFINISHED)


class Interval(Struct, frozen=True):
    """A closed interval of numbers."""

    low: float = -math.inf
    high: float = math.inf

    @classmethod
    def parse(cls, text: str, option: str) -> "Interval":
        """Parse `3`, `3..7`, `3..` or `..7`.

        Raises:
            SettingsError: the text is no interval.
        """
        low, dots, high = text.partition("..")
        try:
            found = cls(float(low or -math.inf), float((high if dots else low) or math.inf))
        except ValueError:
            found = None
        if found is None or not text.strip(".") or math.isnan(found.low + found.high) or found.low > found.high:
            raise SettingsError(f"{option} {text}: write a number or an interval, such as 3, 3..7, 3.. or ..7")
        return found

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:g}"
        return (
            f"{'' if self.low == -math.inf else f'{self.low:g}'}..{'' if self.high == math.inf else f'{self.high:g}'}"
        )

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


class Filter(Struct, frozen=True, kw_only=True):
    """Conditions that all hold for a completion; None and empty: no condition."""

    steps: Interval | None = None
    """Of the step that ended the group."""
    versions: Interval | None = None
    """Of a policy version that sampled the completion."""
    rewards: Interval | None = None
    """Of a measured reward."""
    ends: tuple[str, ...] = ()
    """How the episode ended, or the group's outcome; one of them holds."""
    prompt: str = ""
    """Id of the prompt, or a part of its text."""
    invalid: bool = False
    """Only invalid completions."""

    def __str__(self) -> str:
        options = {"step": self.steps, "version": self.versions, "reward": self.rewards, "prompt": self.prompt}
        named = [f"--{name} {value}" for name, value in options.items() if value]
        return " and ".join([*named, *(f"--end {end}" for end in self.ends), *(["--invalid"] if self.invalid else [])])

    def matches(self, found: RunCompletion) -> bool:
        """Whether all conditions hold."""
        return (
            (self.steps is None or found.step in self.steps)
            and (self.versions is None or any(version in self.versions for version in found.versions))
            and (self.rewards is None or found.reward in self.rewards)
            and (not self.ends or not _names(found).isdisjoint(self.ends))
            and (not self.prompt or _is_of_prompt(found, self.prompt))
            and (not self.invalid or bool(found.why_invalid))
        )


def make_filter(
    steps: str, versions: str, rewards: str, ends: tuple[str, ...], prompt: str, *, invalid: bool
) -> Filter:
    """Make a filter of command line options; empty ones are no condition.

    Raises:
        SettingsError: an option has no valid value.
    """
    for end in ends:
        if end not in (*_ENDS, *_OUTCOMES) and not end.startswith(("dropped:", "failed:", "reward:")):
            raise SettingsError(
                f"--end {end}: write {', '.join(map(str, (*_ENDS, *_OUTCOMES)))}, or dropped:REASON, failed:REASON, "
                "reward:REASON"
            )
    return Filter(
        steps=Interval.parse(steps, "--step") if steps else None,
        versions=Interval.parse(versions, "--version") if versions else None,
        rewards=Interval.parse(rewards, "--reward") if rewards else None,
        ends=ends,
        prompt=prompt,
        invalid=invalid,
    )


class Chosen:
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
        self._kept: list[tuple[float, int, RunCompletion]] = []
        """A heap of rank, number, completion; the lowest rank goes first."""

    @property
    def is_complete(self) -> bool:
        """Whether no later completion can be chosen."""
        return self._order == "newest" and len(self._kept) == self._count

    def offer(self, found: RunCompletion) -> None:
        """Keep the completion if it is among the first."""
        rank = self._rank(found)
        if rank is None:
            return
        self.offered += 1
        entry = (rank, -self.offered, found)
        if len(self._kept) < self._count:
            heapq.heappush(self._kept, entry)
        elif entry[:2] > self._kept[0][:2]:
            heapq.heapreplace(self._kept, entry)

    def result(self) -> list[RunCompletion]:
        """Return what was kept, the first of the order first."""
        return [found for _, _, found in sorted(self._kept, key=lambda entry: entry[:2], reverse=True)]

    def _rank(self, found: RunCompletion) -> float | None:
        ranks: dict[Order, Callable[[], float | None]] = {
            "newest": lambda: 0.0,
            "random": self._random.random,
            "best": lambda: found.reward,
            "worst": lambda: None if found.reward is None else -found.reward,
        }
        return ranks[self._order]()


def end_names(end: str, reason: str, outcome: str) -> set[str]:
    """Return the names by which `--end`, and the dashboard's filter, find a completion.

    Args:
        end: how the episode ended: `finished`, why it was truncated, or `failed`.
        reason: why the completion is invalid: `failed:REASON` or `reward:REASON`; empty if it is valid.
        outcome: of the group: `trained`, `dropped:REASON` or `unfinished`.
    """
    names = {end, outcome, *((reason, "invalid") if reason else ("valid",))}
    if end not in ("finished", "failed"):
        names.add("truncated")
    if outcome.startswith("dropped:"):
        names.add("dropped")
    return names


def _names(found: RunCompletion) -> set[str]:
    names = end_names(found.end, found.reason, found.outcome)
    reason = getattr(found.completion.reward, "reason", None)  # an answer that could not be judged is measured
    return names if reason is None else names | {f"reward:{reason}"}


def _is_of_prompt(found: RunCompletion, text: str) -> bool:
    if found.group.prompt.id == text:
        return True
    messages = found.completion.prompt_messages or found.group.prompt.messages
    return any(text in content_text(message.get("content")) for message in messages)
