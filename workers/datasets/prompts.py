"""The prompts of a run by id, and its held-out prompts.

Ids are derived from rows, so the feeder's cursor determines which prompts were fed.
"""

from collections.abc import Iterable, Iterator

from stream.errors import DataError
from stream.records import Prompt
from workers.datasets.mix import DatasetMix, open_dataset_mix
from workers.datasets.row_mapping import row_to_prompt
from workers.settings import Settings


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


def read_evaluation_prompts(settings: Settings) -> tuple[list[Prompt], str]:
    """Return the evaluation prompts in the order of their file, and the file's fingerprint.

    Raises:
        DataError: there are no rows, or a row is not a prompt.
    """
    mix = open_dataset_mix(settings.for_evaluation, setting="eval.path")
    prompts, errors = mix.read_prompts(0, mix.total_prompts)
    if errors:
        raise errors[0]
    if not prompts:
        raise DataError(f"{settings.eval.path}: eval.path has no prompts")
    return prompts, mix.fingerprint()
