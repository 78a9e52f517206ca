"""The mix of a run's datasets: which row of which dataset is at each position of the feed.

A position alone determines its row: on every machine, in every process, and after a restart. Each dataset is read in
its own order, epoch after epoch. Its rows are spread as evenly as possible, so that every optimizer batch has its
share of each dataset::

    weights 2 : 1      a b a a b a a b a ...

A data set that is changed between two starts would feed rows twice, or never, so a run knows its rows (`fixed_rows`).
They are compared by what they mean: a file may be written anew in another way. Files whose bytes are those of the run's
first start are not read row by row.
"""

import hashlib
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from stream.connection.run_identity import FILES
from stream.errors import DataError
from stream.records import Prompt
from workers.datasets.row_mapping import prompt_id, row_to_prompt
from workers.datasets.sources import (
    GeneratedSource,
    Source,
    default_dataset_name,
    epoch_order,
    files_fingerprint,
    first_environment_row,
    open_source,
)
from workers.settings import Settings
from workers.settings.data import ENVIRONMENT_ROWS, DatasetSettings

_MAX_REPEATS = 100
"""How often rows may be repeated on average until each row of every dataset has been fed."""
_ROWS: Final = "data.rows."


class SampleIndex(NamedTuple):
    """The row that a prompt is made from."""

    dataset: int
    """Index of the dataset in the mix."""
    epoch: int
    row: int


class Dataset(NamedTuple):
    """One dataset of a mix."""

    settings: Settings
    """The run's settings, with `[data]` as if this were the only dataset."""
    source: Source
    name: str
    weight: float


class DatasetMix:
    """All datasets of a run; often one.

    Args:
        settings: of the run.
        datasets: its datasets.
    """

    def __init__(self, settings: Settings, datasets: Sequence[Dataset]) -> None:
        self.settings = settings
        self.datasets = datasets
        self.sizes = [len(dataset.source) for dataset in datasets]
        """Rows of each dataset."""

    @property
    def paths(self) -> str:
        """The paths of the datasets, for messages."""
        return ", ".join(dataset.settings.data.path for dataset in self.datasets)

    @cached_property
    def prompt_counts(self) -> list[int]:
        """The number of positions of each dataset in the whole feed."""
        epochs, weights = self.settings.data.epochs, [dataset.weight for dataset in self.datasets]
        if not all(weights) or len(self.sizes) == 1:
            return [epochs * size for size in self.sizes]
        weights = [weight if size else 0.0 for weight, size in zip(weights, self.sizes, strict=True)]
        passes = max(
            (epochs * size / weight for size, weight in zip(self.sizes, weights, strict=True) if weight), default=0.0
        )
        counts = [math.ceil(round(passes * weight, 6)) for weight in weights]
        if sum(counts) > _MAX_REPEATS * epochs * max(1, sum(self.sizes)):
            raise DataError(
                f"[[data.sets]]: with these weights {sum(counts):,} prompts would be fed until each of the "
                f"{sum(self.sizes):,} rows was fed once; bring the weights nearer to the numbers of rows"
            )
        return counts

    @property
    def total_prompts(self) -> int:
        """The number of positions in the feed, over all epochs."""
        return sum(self.prompt_counts)

    def sample_indices(self, start: int, stop: int) -> Iterator[SampleIndex]:
        """Yield the row at each of these positions."""
        start, stop = max(0, start), min(stop, self.total_prompts)
        if start >= stop:
            return
        turns = _interleave(tuple(self.prompt_counts)) if len(self.sizes) > 1 else None
        consumed = self._consumed_counts(start)
        for position in range(start, stop):
            i = turns[position] if turns is not None else 0
            epoch, offset = divmod(consumed[i], self.sizes[i])
            consumed[i] += 1
            yield SampleIndex(i, epoch, self._epoch_order(i, epoch)[offset])

    def read_prompts(self, start: int, stop: int) -> tuple[list[Prompt], list[DataError]]:
        """Return the prompts at these positions, and an error for each row that is not a prompt."""
        prompts: list[Prompt] = []
        errors: list[DataError] = []
        samples = list(self.sample_indices(start, stop))
        rows = [
            dataset.source.read_rows([sample.row for sample in samples if sample.dataset == i])
            for i, dataset in enumerate(self.datasets)
        ]
        for sample in samples:
            _, row = next(rows[sample.dataset])
            try:
                if isinstance(row, DataError):
                    raise row
                dataset = self.datasets[sample.dataset]
                prompts.append(
                    row_to_prompt(row, sample.row, sample.epoch, settings=dataset.settings, dataset=dataset.name)
                )
            except DataError as error:
                errors.append(error)
        return prompts, errors

    def consumed_ids(self, cursor: int) -> set[str]:
        """Return the ids of all rows before the cursor, including rows that are not prompts."""
        found = set[str]()
        for i, consumed in enumerate(self._consumed_counts(min(max(0, cursor), self.total_prompts))):
            name, size = self.datasets[i].name, self.sizes[i]
            for epoch in range(math.ceil(consumed / size) if size else 0):
                count = min(size, consumed - epoch * size)
                rows = range(size) if count == size else islice(self._epoch_order(i, epoch), count)
                found.update(prompt_id(name, epoch, row) for row in rows)
        return found

    def find_sample(self, prompt: str) -> SampleIndex | None:
        """Return the row that the prompt with this id is made from; None if there is none."""
        name, *numbers = prompt.rsplit(":", 2)
        i = next((i for i, dataset in enumerate(self.datasets) if dataset.name == name), None)
        if i is None or len(numbers) != 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
            return None
        sample = SampleIndex(i, *map(int, numbers))
        if prompt_id(name, sample.epoch, sample.row) != prompt:
            return None
        size = self.sizes[i]
        left = self.prompt_counts[i] - sample.epoch * size
        is_fed = left >= size or sample.row in islice(self._epoch_order(i, sample.epoch), max(0, left))
        return sample if sample.row < size and is_fed else None

    def fingerprint(self) -> str:
        """Return a digest of the content of all datasets and of their mix."""
        if len(self.datasets) == 1:
            return self.datasets[0].source.fingerprint()
        digest = hashlib.blake2b(digest_size=16)
        for dataset, count in zip(self.datasets, self.prompt_counts, strict=True):
            digest.update(f"{dataset.name}\0{count}\0{dataset.source.fingerprint()}\0".encode())
        return digest.hexdigest()

    def _consumed_counts(self, cursor: int) -> list[int]:
        """Return the number of positions before the cursor, for each dataset."""
        if len(self.sizes) == 1:
            return [min(cursor, self.total_prompts)]
        turns = _interleave(tuple(self.prompt_counts))
        return [turns.count(i, 0, max(0, cursor)) for i in range(len(self.sizes))]

    def _epoch_order(self, i: int, epoch: int) -> Sequence[int]:
        return epoch_order(self.sizes[i], epoch, self.settings.run.seed, self.settings.data.shuffle)


def dataset_name(dataset: DatasetSettings) -> str:
    """Return the name of a data set, which is a part of its prompts' ids."""
    return dataset.name or default_dataset_name(dataset.source)


def open_dataset_mix(settings: Settings, setting: str = "data.path") -> DatasetMix:
    """Open all datasets of `[data]`.

    Args:
        settings: of the run.
        setting: the setting that names the only data set, for error messages.

    Raises:
        DataError: a dataset cannot be opened, or two have the same name.
    """
    data = settings.data
    datasets: dict[str, Dataset] = {}
    for each in settings.datasets:
        name = dataset_name(each)
        if name in datasets:
            raise DataError(
                f"two datasets have the name {name!r}, {datasets[name].settings.data.path} and {each.source}, so their "
                "prompts would have the same ids; give one of them another `name`"
            )
        its_settings = _settings_for(each, settings)
        source = open_source(its_settings.data, "[[data.sets]] path" if data.sets else setting)
        datasets[name] = Dataset(its_settings, source, name, each.weight)
    return DatasetMix(settings, list(datasets.values()))


def open_recorded_mix(settings: Settings, lengths: Mapping[str, int]) -> DatasetMix | None:
    """Return the mix of datasets of which only the lengths are known: which prompts there are, without their content.

    Args:
        settings: of the run.
        lengths: number of rows of each dataset.

    Returns:
        None if the length of a dataset is not known.
    """
    names = {dataset_name(each): each for each in settings.datasets}
    if not all(name in lengths for name in names):
        return None
    return DatasetMix(
        settings,
        [Dataset(settings, GeneratedSource(lengths[name]), name, each.weight) for name, each in names.items()],
    )


def _settings_for(dataset: DatasetSettings, settings: Settings) -> Settings:
    """Return the settings as if this dataset were the only one; its environment is the first, which is the default."""
    data, column = settings.data, dataset.prompt or settings.data.prompt
    replaced = msgspec.structs.replace(
        data,
        sets=(),
        path=dataset.source,
        config=dataset.config,
        split="",
        revision=dataset.revision,
        rows=0,
        prompt="" if dataset.rows or _lacks_column(dataset.source, column) else column,
        columns=data.columns | dataset.columns,
        system=dataset.system or data.system,
    )
    environments = settings.environments
    if first := dataset.environment:
        environments = {first: environments[first]} | environments
    return msgspec.structs.replace(settings, data=replaced, environments=environments)


def _lacks_column(source: str, column: str) -> bool:
    """Return whether an environment's own rows have no prompts, so that `reset` returns them."""
    return source.startswith(ENVIRONMENT_ROWS) and column not in first_environment_row(source)


@lru_cache(maxsize=2)
def _interleave(counts: tuple[int, ...]) -> bytes:
    """Return the dataset of each position, one byte each, so that every dataset's positions are spread evenly."""
    turns = bytearray()
    # The j-th turn of a dataset with n positions is due at (j + 1/2) / n of the way.
    due = [(0.5 / count, i, 0) for i, count in enumerate(counts) if count]
    heapq.heapify(due)
    while due:
        _, i, turn = due[0]
        turns.append(i)
        if turn + 1 < counts[i]:
            heapq.heapreplace(due, ((turn + 1.5) / counts[i], i, turn + 1))
        else:
            heapq.heappop(due)
    return bytes(turns)


def fixed_rows(settings: Settings, known: Mapping[str, str]) -> dict[str, str]:
    """Return the number and a digest of each data set's rows, and a digest of the bytes of its files.

    Args:
        settings: of the run.
        known: what the run knows; rows of files whose bytes it knows are not read.

    Raises:
        DataError: a data set cannot be read.
    """
    sources = {dataset_name(each): each for each in settings.datasets}
    try:
        files = {
            FILES + name: files_fingerprint(each.source, each.config, each.revision) for name, each in sources.items()
        }
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; data.path names the prompts") from error
    if all(known.get(name) == digest for name, digest in files.items()):
        rows = {name: known[name] for each in sources if (name := _ROWS + each) in known}
        if len(rows) == len(sources):
            return rows | files
    return {_ROWS + each.name: _describe(each) for each in open_dataset_mix(settings).datasets} | files


def recorded_lengths(fixed: Mapping[str, str]) -> dict[str, int]:
    """Return how many rows each data set of a run has, by name."""
    return {
        name.removeprefix(_ROWS): int(rows.partition(" ")[0]) for name, rows in fixed.items() if name.startswith(_ROWS)
    }


def are_known(datasets: Sequence[Dataset], fixed: Mapping[str, str]) -> bool:
    """Return whether data sets hold the rows that a run knows, and no others. Reads all rows."""
    return all(fixed.get(_ROWS + each.name) == _describe(each) for each in datasets)


def _describe(dataset: Dataset) -> str:
    return f"{len(dataset.source)} rows of digest {dataset.source.row_digest()}"
