"""Varied valid records: several completions, rows, turns, failures, snapshots, and values at every limit.

The snapshots are of a diary: an environment with attributes of every kind that a snapshot holds.
"""

import datetime as dt
from array import array
from collections import Counter, deque
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from random import Random
from typing import Any

import msgspec

from envs.snapshot import freeze
from stream.records import Completion, Failure, Group, Message, Prompt, RewardPart, Row, Span
from stream.validity import Measured, Reward, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.soak.ends import VOCABULARY

_TEXTS = (
    "",
    "Say 7.",
    "naïve café",
    "日本語テキスト",
    "🙂👩‍👩‍👧",
    "\u202eright to left",
    "\0\x1b[31m",
    "{{ 7 * 7 }}",
    "a" * 300,
)
_SOME_DAY = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)
_NUMBERS = (0, 1, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308, float("inf"), float("nan"))


class Mood(Enum):
    """Mood of a day."""

    GOOD = "good"
    BAD = "bad"


@dataclass
class Entry:
    """One line of the diary."""

    text: str
    mood: Mood


class Diary:
    """Records its entries in attributes of many types."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.begun = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
        self.pages = {1: "one", (2, 3): {"a", "b"}}
        self.last = deque([1, 2.5, "three"], maxlen=5)
        self.words = Counter("abracadabra")
        self.price = Decimal("1.10")
        self.share = Fraction(1, 3)
        self.huge = 2**200
        self.raw = b"\x00\xff"
        self.handle = lambda: None

    def reset(self, **_row):
        """Begin a new diary."""
        self.entries = [Entry("first", Mood.GOOD)]
        return "Dear diary,"

    def write(self, text: str) -> str:
        """Add an entry.

        Args:
            text: what happened.
        """
        self.entries.append(Entry(text, Mood.BAD))
        return "Noted."


def pages(environments, completions):
    """Read everything that is left of the diaries."""
    return [float(len(repr(vars(diary))) % 7) for diary in environments]


class Samples:
    """Makes records from a seed."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._made = 0

    def prompt(self) -> Prompt:
        """Return a prompt as a feeder may put it into the queue."""
        chance = self._chance
        self._made += 1
        return Prompt(
            id=f"{chance.choice(('train', 'größer', '🙂'))}:0:{self._made}",
            messages=[self._message() for _ in range(chance.randint(1, 4))],
            is_plain_text=chance.random() < 0.2,
            fields={self._text() or "empty": self.value() for _ in range(chance.randint(0, 4))},
            environment="diary",
            group_size=chance.randint(1, 8),
            row=self._made,
            seed=chance.getrandbits(31),
            fed_at=1.8e9,
        )

    def group(self) -> Group:
        """Return a group as the trainer receives it, with some rewards missing or not finite."""
        chance = self._chance
        size = chance.choice((1, 2, 3, 4, 6))
        completions = [self._completion(i) for i in range(size)]
        if chance.random() < 0.2:
            completions.append(self._completion(size))
            completions[-1].greedy = True
        return Group(prompt=self.prompt(), completions=completions, attempt=chance.randint(0, 3), worker="w")

    def value(self, depth: int = 3) -> Any:
        """Return any value that a column of a prompt file may hold."""
        chance = self._chance
        kind = chance.randint(0, 9 if depth else 6)
        if kind >= 7:
            inner = [self.value(depth - 1) for _ in range(chance.randint(0, 3))]
            return inner if kind == 7 else {self._text() + str(i): each for i, each in enumerate(inner)}
        plain = (None, True, chance.choice(_NUMBERS), self._text(), chance.randbytes(5), chance.random(), _SOME_DAY)
        return plain[kind]

    def _text(self) -> str:
        return self._chance.choice(_TEXTS)

    def _message(self) -> Message:
        chance = self._chance
        message: Message = {"role": chance.choice(("system", "user", "assistant", "tool")), "content": self._text()}
        if chance.random() < 0.2:
            message["content"] = [{"type": "text", "text": self._text()}, {"type": "image", "image": b"\x89PNG"}]
        if chance.random() < 0.2:
            message["tool_calls"] = [{"type": "function", "function": {"name": "write", "arguments": {"text": "x"}}}]
        return message

    def _completion(self, index: int) -> Completion:
        chance = self._chance
        rows = [self._row() for _ in range(chance.choice((0, 1, 1, 1, 1, 2, 3)))]
        parts = [RewardPart(name=name, reward=self._reward()) for name in ("exact", "style")[: chance.randint(0, 2)]]
        turns = sum(len(row.sampled_ranges) for row in rows)
        if chance.random() < 0.3:
            parts += [RewardPart(name="env", reward=self._reward(), turn=turn) for turn in range(turns)]
        return Completion(
            index=index,
            rows=rows,
            prompt_messages=[self._message()],
            messages=[self._message() for _ in range(chance.randint(0, 3))],
            failure=Failure(reason=chance.choice(list(RolloutReason)), detail=self._text())
            if chance.random() < 0.05
            else None,
            truncated=chance.choice(list(TruncationReason)) if chance.random() < 0.2 else None,
            parts=parts,
            reward=None if chance.random() < 0.05 else self._reward(),
            snapshot=self._snapshot() if chance.random() < 0.7 else None,
            turns=turns,
            tool_calls=chance.randint(0, 2),
            seconds={"total": chance.random()},
        )

    def _reward(self) -> Reward:
        chance = self._chance
        odd = chance.random()
        if odd < 0.05:
            return Unmeasured(chance.choice(list(RewardReason)), self._text())
        return Measured(chance.choice((-1e12, float("nan"), float("inf")) if odd < 0.1 else (0.0, 1.0, 0.5)))

    def _row(self) -> Row:
        chance = self._chance
        sampled, at = [], 0
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            start = at + chance.randint(0, 3)
            at = start + chance.randint(1, 6)
            sampled.append((start, at))
        count = sum(end - start for start, end in sampled)
        return Row(
            prompt_ids=self._ids(chance.randint(1, 6)),
            token_ids=self._ids(at),
            sampled_ranges=sampled,
            logprobs=array("f", [-chance.random() for _ in range(count)]).tobytes(),
            spans=[Span(chance.randint(0, 9), start, end) for start, end in sampled],
        )

    def _ids(self, count: int) -> bytes:
        return b"".join(self._chance.randrange(VOCABULARY).to_bytes(4, "little") for _ in range(count))

    def _snapshot(self) -> bytes:
        diary = Diary()
        diary.reset()
        diary.entries.append(Entry(self._text(), Mood.BAD))
        diary.pages[self._made] = msgspec.msgpack.encode(self.value())
        return freeze(diary, 10_000)
