"""Which prompts a feeder has fed, told from where its cursor stands: the ids of prompts follow from their rows."""

from collections.abc import Iterable, Iterator

from stream.errors import DataError
from workers.feed.dataset_mix import DatasetMix
from workers.feed.row_mapping import row_to_prompt


class PromptIndex:
    """The prompts of a run's data sets, by id.

    Args:
        dataset_mix: of the run.
    """

    def __init__(self, dataset_mix: DatasetMix) -> None:
        self._dataset_mix = dataset_mix
        self.total_prompts = dataset_mix.total_prompts
        """Rows, epochs counted through."""

    def ids_before(self, cursor: int) -> set[str]:
        """The ids of all rows that this cursor has passed, those that could not be fed included."""
        return self._dataset_mix.consumed_ids(cursor)

    def invalid_ids(self, ids: Iterable[str]) -> set[str]:
        """Of these, those whose rows cannot be fed; no other row is read."""
        rows = {each: (place.dataset, place.row) for each in ids if (place := self._dataset_mix.find_sample(each))}
        bad = {
            (part, number)
            for part in range(len(self._dataset_mix.datasets))
            for number in self._invalid_rows(part, set(rows.values()))
        }
        return {each for each, row in rows.items() if row in bad}

    def __contains__(self, name: str) -> bool:
        """Whether the prompt of some row is called so."""
        return self._dataset_mix.find_sample(name) is not None

    def _invalid_rows(self, part: int, rows: set[tuple[int, int]]) -> Iterator[int]:
        """Those of these rows of one data set that make no prompt; the epoch makes no difference."""
        numbers = sorted(number for owner, number in rows if owner == part)
        for number, row in self._dataset_mix.datasets[part].source.read_rows(numbers):
            if isinstance(row, DataError):
                yield number
                continue
            try:
                row_to_prompt(row, number, 0, settings=self._dataset_mix.datasets[part].settings)
            except DataError:
                yield number
