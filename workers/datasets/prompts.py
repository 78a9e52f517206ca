"""The prompts of a run by id. Ids are derived from rows, so the feeder's cursor determines which prompts were fed."""

from collections.abc import Iterable, Iterator

from stream.errors import DataError
from workers.datasets.mix import DatasetMix
from workers.datasets.row_mapping import row_to_prompt


class PromptIndex:
    """The prompts of a run's data sets by id. `id in index` is true if a row has this id.

    Args:
        dataset_mix: the run's data sets.
    """

    def __init__(self, dataset_mix: DatasetMix) -> None:
        self._dataset_mix = dataset_mix
        self.total_prompts = dataset_mix.total_prompts
        """Number of prompts in all epochs."""

    def ids_before(self, cursor: int) -> set[str]:
        """Return the ids of all rows before this cursor, including rows that cannot be fed."""
        return self._dataset_mix.consumed_ids(cursor)

    def invalid_ids(self, ids: Iterable[str]) -> set[str]:
        """Return the subset of `ids` whose rows cannot be fed. Reads only the rows of `ids`."""
        rows = {each: (sample.dataset, sample.row) for each in ids if (sample := self._dataset_mix.find_sample(each))}
        invalid = {
            (dataset, row)
            for dataset in range(len(self._dataset_mix.datasets))
            for row in self._invalid_rows(dataset, set(rows.values()))
        }
        return {each for each, row in rows.items() if row in invalid}

    def __contains__(self, prompt_id: str) -> bool:
        return self._dataset_mix.find_sample(prompt_id) is not None

    def _invalid_rows(self, dataset: int, rows: set[tuple[int, int]]) -> Iterator[int]:
        """Yield the rows of one data set that cannot become a prompt, in any epoch."""
        numbers = sorted(row for owner, row in rows if owner == dataset)
        opened = self._dataset_mix.datasets[dataset]
        for number, row in opened.source.read_rows(numbers):
            if isinstance(row, DataError):
                yield number
                continue
            try:
                row_to_prompt(row, number, 0, settings=opened.settings)
            except DataError:
                yield number
