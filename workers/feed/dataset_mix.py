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
from workers.feed.row_mapping import prompt_id, row_to_prompt
from workers.feed.source import Row, Source, default_dataset_name, epoch_order, open_source
from workers.settings import Settings
from workers.settings.data import DatasetSettings

_MAX_REPEATS = 100
"""Times that a set may be passed on average while the mix goes once through the others."""


class SampleIndex(NamedTuple):
    """Where a prompt comes from."""

    dataset: int
    epoch: int
    row: int


class Dataset(NamedTuple):
    """One data set."""

    settings: Settings
    """Of the run, with `[data]` as if this set were the only one."""
    source: Source
    name: str
    weight: float


class DatasetMix:
    """All data sets of a run; often one.

    Args:
        settings: of the run.
        datasets: its data sets.
    """

    def __init__(self, settings: Settings, datasets: Sequence[Dataset]) -> None:
        self._settings = settings
        self.datasets = datasets
        self.sizes = [len(part.source) for part in datasets]

    @property
    def paths(self) -> str:
        """Where they are, for messages."""
        return ", ".join(part.settings.data.path for part in self.datasets)

    @cached_property
    def prompt_counts(self) -> list[int]:
        """How many places each set has in the whole feed."""
        epochs = self._settings.data.epochs
        if not all(part.weight for part in self.datasets) or len(self.datasets) == 1:
            return [epochs * size for size in self.sizes]
        weights = [part.weight if size else 0.0 for part, size in zip(self.datasets, self.sizes, strict=True)]
        passes = max(
            (epochs * size / weight for size, weight in zip(self.sizes, weights, strict=True) if weight), default=0.0
        )
        counts = [math.ceil(round(passes * weight, 6)) for weight in weights]
        if sum(counts) > _MAX_REPEATS * epochs * max(1, sum(self.sizes)):
            raise DataError(
                f"[[data.sets]]: with these weights {sum(counts):,} prompts would be fed until each of "
                f"{sum(self.sizes):,} rows was once; bring the weights nearer to the numbers of rows"
            )
        return counts

    @property
    def total_prompts(self) -> int:
        """Places, epochs counted through."""
        return sum(self.prompt_counts)

    def sample_indices(self, start: int, stop: int) -> Iterator[SampleIndex]:
        """What stands at these places of the feed."""
        turns = _interleave(tuple(self.prompt_counts)) if len(self.datasets) > 1 else None
        passed = self.consumed_counts(start)
        for place in range(start, min(stop, self.total_prompts)):
            part = turns[place] if turns is not None else 0
            epoch, position = divmod(passed[part], self.sizes[part])
            passed[part] += 1
            yield SampleIndex(part, epoch, self._epoch_order(part, epoch)[position])

    def consumed_counts(self, cursor: int) -> list[int]:
        """How many places of each set stand before this one."""
        if len(self.datasets) == 1:
            return [min(cursor, self.total_prompts)]
        turns = _interleave(tuple(self.prompt_counts))
        return [turns.count(part, 0, max(0, cursor)) for part in range(len(self.datasets))]

    def read_prompts(self, start: int, stop: int) -> tuple[list[Prompt], list[DataError]]:
        """The prompts at these places, and what kept other rows from becoming prompts."""
        prompts: list[Prompt] = []
        errors: list[DataError] = []
        places = list(self.sample_indices(start, stop))
        rows = [
            part.source.read_rows([p.row for p in places if p.dataset == i]) for i, part in enumerate(self.datasets)
        ]
        for place in places:
            _, row = next(rows[place.dataset])
            try:
                if isinstance(row, DataError):
                    raise row
                prompts.append(_prompt(self.datasets[place.dataset], row, place.row, place.epoch))
            except DataError as error:
                errors.append(error)
        return prompts, errors

    def consumed_ids(self, cursor: int) -> set[str]:
        """The ids of all rows that this cursor has passed, those that could not be fed included."""
        ids: set[str] = set()
        for part, passed in enumerate(self.consumed_counts(cursor)):
            size = self.sizes[part]
            for epoch in range(math.ceil(passed / size) if size else 0):
                count = min(size, passed - epoch * size)
                numbers = range(size) if count == size else self._epoch_order(part, epoch)
                ids.update(prompt_id(self.datasets[part].name, epoch, number) for number in islice(numbers, count))
        return ids

    def find_sample(self, prompt: str) -> SampleIndex | None:
        """Where the prompt of this id comes from; None where no row's prompt is called so."""
        data_set, *numbers = prompt.rsplit(":", 2)
        part = next((i for i, part in enumerate(self.datasets) if part.name == data_set), None)
        if part is None or len(numbers) != 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
            return None
        epoch, number = map(int, numbers)
        size, count = self.sizes[part], self.prompt_counts[part]
        if number >= size or prompt_id(data_set, epoch, number) != prompt:
            return None
        left = count - epoch * size
        there = left >= size or number in islice(self._epoch_order(part, epoch), max(0, left))
        return SampleIndex(part, epoch, number) if there else None

    def fingerprint(self) -> str:
        """A digest of the content of all data sets, and of how they are mixed."""
        if len(self.datasets) == 1:
            return self.datasets[0].source.fingerprint()
        digest = hashlib.blake2b(digest_size=16)
        for part, count in zip(self.datasets, self.prompt_counts, strict=True):
            digest.update(f"{part.name}\0{count}\0{part.source.fingerprint()}\0".encode())
        return digest.hexdigest()

    def _epoch_order(self, part: int, epoch: int) -> Sequence[int]:
        return epoch_order(self.sizes[part], epoch, self._settings.run.seed, self._settings.data.shuffle)


def _prompt(dataset: Dataset, row: Row, number: int, epoch: int) -> Prompt:
    return row_to_prompt(row, number, epoch, settings=dataset.settings, dataset=dataset.name)


def open_dataset_mix(settings: Settings) -> DatasetMix:
    """Open all that `[data]` names.

    Raises:
        DataError: a data set cannot be opened, or two are called by one name.
    """
    data = settings.data
    parts: dict[str, Dataset] = {}
    sets = data.sets or (DatasetSettings(path=data.path),)
    for each in sets:
        name = each.name or default_dataset_name(each.path)
        if name in parts:
            raise DataError(
                f"two data sets have the name {name!r}, {parts[name].settings.data.path} and {each.path}, so their "
                "prompts would have the same ids; give one of them another `name`"
            )
        of_set = _settings_for(each, settings)
        source = open_source(of_set.data, "[[data.sets]] path" if data.sets else "data.path")
        parts[name] = Dataset(of_set, source, name, each.weight)
    return DatasetMix(settings, list(parts.values()))


def _settings_for(dataset: DatasetSettings, settings: Settings) -> Settings:
    """Return the settings as if this data set were the only one; its environment is the first, which is the default."""
    data = settings.data
    replaced = msgspec.structs.replace(
        data,
        sets=(),
        path=dataset.path,
        prompt=dataset.prompt or data.prompt,
        columns=data.columns | dataset.columns,
        system=dataset.system or data.system,
    )
    environments = settings.environments
    if first := dataset.environment:
        environments = {first: environments[first]} | environments
    return msgspec.structs.replace(settings, data=replaced, environments=environments)


@lru_cache(maxsize=2)
def _interleave(counts: tuple[int, ...]) -> bytes:
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
