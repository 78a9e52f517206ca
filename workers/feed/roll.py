"""Which prompts a feeder has fed, told from where its cursor stands: the ids of prompts follow from their rows."""

from collections.abc import Iterable, Iterator
from itertools import islice

from stream.errors import DataError
from workers.feed.mapping import prompt_id, to_prompt
from workers.feed.source import Source, dataset_name, order
from workers.settings import Settings


class Roll:
    """The prompts of a run's prompt file, by id.

    Args:
        settings: of the run.
        source: its prompt file.
    """

    def __init__(self, settings: Settings, source: Source) -> None:
        self._settings = settings
        self._source = source
        self._name = dataset_name(settings.data.path)
        self.total = len(source) * settings.data.epochs
        """Rows, epochs counted through."""

    def passed(self, cursor: int) -> set[str]:
        """The ids of all rows that this cursor has passed, those that could not be fed included."""
        settings, size = self._settings, len(self._source)
        ids: set[str] = set()
        for epoch in range(settings.data.epochs):
            count = min(size, cursor - epoch * size)
            if count <= 0:
                break
            whole = count == size
            numbers = range(size) if whole else order(size, epoch, settings.run.seed, settings.data.shuffle)
            ids.update(prompt_id(self._name, epoch, number) for number in islice(numbers, count))
        return ids

    def refused(self, ids: Iterable[str]) -> set[str]:
        """Of these, those whose rows cannot be fed; no other row is read."""
        rows = {each: place[1] for each in ids if (place := self._place(each))}
        bad = set(self._bad(sorted(set(rows.values()))))
        return {each for each, number in rows.items() if number in bad}

    def __contains__(self, name: str) -> bool:
        """Whether the prompt of some row is called so."""
        return self._place(name) is not None

    def _bad(self, numbers: list[int]) -> Iterator[int]:
        """Those of these rows that make no prompt; the epoch makes no difference."""
        for number, row in self._source.rows(numbers):
            if isinstance(row, DataError):
                yield number
                continue
            try:
                to_prompt(row, number, 0, settings=self._settings)
            except DataError:
                yield number

    def _place(self, name: str) -> tuple[int, int] | None:
        """Epoch and row of a prompt; None where no row's prompt is called so."""
        data_set, *numbers = name.rsplit(":", 2)
        if data_set != self._name or len(numbers) != 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
            return None
        epoch, number = map(int, numbers)
        there = epoch < self._settings.data.epochs and number < len(self._source)
        return (epoch, number) if there and prompt_id(self._name, epoch, number) == name else None
