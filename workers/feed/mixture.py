"""A run's data sets, mixed: which row of which set stands at each place of the feed.

A place is told from its number alone: the same on every machine, in every process, and after a restart in the middle.
Each set is passed row by row in its own order, epoch after epoch; the turns of each lie as evenly as they can, so that
every optimizer batch has its share of each::

    weights 2 : 1      a b a a b a a b a ...
"""

import hashlib
import heapq
import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

import msgspec

from stream.errors import DataError
from stream.records import Prompt
from workers.feed.mapping import prompt_id, to_prompt
from workers.feed.source import Source, name_of, open_source, order
from workers.settings import Data, Settings
from workers.settings.data import DataSet

_LARGEST = 100
"""Times that a set may be passed on average while the mix goes once through the others."""


class Place(NamedTuple):
    """Where a prompt comes from."""

    part: int
    epoch: int
    number: int


class Part(NamedTuple):
    """One data set."""

    settings: Settings
    """Of the run, with `[data]` as if this set were the only one."""
    source: Source
    name: str
    weight: float


class Mixture:
    """All data sets of a run; often one.

    Args:
        settings: of the run.
        parts: its data sets.
    """

    def __init__(self, settings: Settings, parts: Sequence[Part]) -> None:
        self._settings = settings
        self.parts = parts
        self.sizes = [len(part.source) for part in parts]

    @property
    def paths(self) -> str:
        """Where they are, for messages."""
        return ", ".join(part.settings.data.path for part in self.parts)

    @cached_property
    def counts(self) -> list[int]:
        """How many places each set has in the whole feed."""
        epochs = self._settings.data.epochs
        if not all(part.weight for part in self.parts) or len(self.parts) == 1:
            return [epochs * size for size in self.sizes]
        weights = [part.weight if size else 0.0 for part, size in zip(self.parts, self.sizes, strict=True)]
        passes = max(
            (epochs * size / weight for size, weight in zip(self.sizes, weights, strict=True) if weight), default=0.0
        )
        counts = [math.ceil(round(passes * weight, 6)) for weight in weights]
        if sum(counts) > _LARGEST * epochs * max(1, sum(self.sizes)):
            raise DataError(
                f"[[data.mix]]: with these weights {sum(counts):,} prompts would be fed until each of "
                f"{sum(self.sizes):,} rows was once; bring the weights nearer to the numbers of rows"
            )
        return counts

    @property
    def total(self) -> int:
        """Places, epochs counted through."""
        return sum(self.counts)

    def places(self, start: int, stop: int) -> Iterator[Place]:
        """What stands at these places of the feed."""
        turns = _turns(tuple(self.counts)) if len(self.parts) > 1 else None
        passed = self.passed(start)
        for place in range(start, min(stop, self.total)):
            part = turns[place] if turns is not None else 0
            epoch, position = divmod(passed[part], self.sizes[part])
            passed[part] += 1
            yield Place(part, epoch, self._order(part, epoch)[position])

    def passed(self, cursor: int) -> list[int]:
        """How many places of each set stand before this one."""
        if len(self.parts) == 1:
            return [min(cursor, self.total)]
        turns = _turns(tuple(self.counts))
        return [turns.count(part, 0, max(0, cursor)) for part in range(len(self.parts))]

    def read(self, start: int, stop: int) -> tuple[list[Prompt], list[DataError]]:
        """The prompts at these places, and what kept other rows from becoming prompts."""
        prompts: list[Prompt] = []
        errors: list[DataError] = []
        places = list(self.places(start, stop))
        rows = [part.source.rows([p.number for p in places if p.part == i]) for i, part in enumerate(self.parts)]
        for place in places:
            _, row = next(rows[place.part])
            try:
                if isinstance(row, DataError):
                    raise row
                prompts.append(to_prompt(row, place.number, place.epoch, settings=self.parts[place.part].settings))
            except DataError as error:
                errors.append(error)
        return prompts, errors

    def fed(self, cursor: int) -> set[str]:
        """The ids of all rows that this cursor has passed, those that could not be fed included."""
        ids: set[str] = set()
        for part, passed in enumerate(self.passed(cursor)):
            size = self.sizes[part]
            for epoch in range(math.ceil(passed / size) if size else 0):
                count = min(size, passed - epoch * size)
                numbers = range(size) if count == size else self._order(part, epoch)
                ids.update(prompt_id(self.parts[part].name, epoch, number) for number in islice(numbers, count))
        return ids

    def place_of(self, name: str) -> Place | None:
        """Where the prompt of this id comes from; None where no row's prompt is called so."""
        data_set, *numbers = name.rsplit(":", 2)
        part = next((i for i, part in enumerate(self.parts) if part.name == data_set), None)
        if part is None or len(numbers) != 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
            return None
        epoch, number = map(int, numbers)
        size, count = self.sizes[part], self.counts[part]
        if number >= size or prompt_id(data_set, epoch, number) != name:
            return None
        left = count - epoch * size
        there = left >= size or number in islice(self._order(part, epoch), max(0, left))
        return Place(part, epoch, number) if there else None

    def fingerprint(self) -> str:
        """A digest of the content of all data sets, and of how they are mixed."""
        if len(self.parts) == 1:
            return self.parts[0].source.fingerprint()
        digest = hashlib.blake2b(digest_size=16)
        for part, count in zip(self.parts, self.counts, strict=True):
            digest.update(f"{part.name}\0{count}\0{part.source.fingerprint()}\0".encode())
        return digest.hexdigest()

    def _order(self, part: int, epoch: int) -> Sequence[int]:
        return order(self.sizes[part], epoch, self._settings.run.seed, self._settings.data.shuffle)


def open_mixture(settings: Settings) -> Mixture:
    """Open all that `[data]` names.

    Raises:
        DataError: a data set cannot be opened, or two are called by one name.
    """
    data = settings.data
    parts: dict[str, Part] = {}
    for each, weight in [(_alone(data, m), m.weight) for m in data.mix] or [(data, 0.0)]:
        name = name_of(each)
        if name in parts:
            raise DataError(
                f"two data sets are called {name!r}, {parts[name].settings.data.path} and {each.path}, and so would "
                "their prompts be; give one of them another `name`"
            )
        source = open_source(each, "[[data.mix]] path" if data.mix else "data.path")
        parts[name] = Part(msgspec.structs.replace(settings, data=each), source, name, weight)
    return Mixture(settings, list(parts.values()))


def _alone(data: Data, each: DataSet) -> Data:
    """The table `[data]` as if it had this data set only."""
    return msgspec.structs.replace(
        data,
        mix=(),
        path=each.path,
        name=each.name,
        prompt=each.prompt or data.prompt,
        columns=data.columns | each.columns,
        system=each.system or data.system,
        environment=each.environment or data.environment,
    )


@lru_cache(maxsize=2)
def _turns(counts: tuple[int, ...]) -> bytes:
    """Whose turn it is at each place, so that each set's turns lie as evenly as they can: one byte to a place."""
    turns = bytearray()
    # The j-th turn of a set with n places is due at (j + 1/2) / n of the way.
    due = [(0.5 / count, part, 0) for part, count in enumerate(counts) if count]
    heapq.heapify(due)
    while due:
        _, part, turn = due[0]
        turns.append(part)
        if turn + 1 < counts[part]:
            heapq.heapreplace(due, ((turn + 1.5) / counts[part], part, turn + 1))
        else:
            heapq.heappop(due)
    return bytes(turns)
