"""Tables with access to rows by index: a Parquet file, and data sets that the library `datasets` reads."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stream.errors import DataError

Row = dict[str, Any]

_SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")
"""Files of a folder that `save_to_disk` wrote; any other folder holds data files, as a repository on the hub does."""
_CONFIGS = re.compile(r"(?:available configs|Available): \[(.*?)\]")
_SPLITS = re.compile(r"Unknown split \"(.*?)\". Should be one of \[(.*?)\]")


class Table:
    """A table with access to rows by index.

    Args:
        size: number of rows.
        columns: their names.
        row: returns the row with an index.
        values: returns the rows from a start up to a stop index as they are stored: images, for example, as bytes.
    """

    def __init__(
        self,
        size: int,
        columns: Sequence[str],
        row: Callable[[int], Row],
        values: Callable[[int, int], Sequence[Row]],
    ) -> None:
        self._size = size
        self.columns = columns
        self.row = row
        self.values = values

    def __len__(self) -> int:
        return self._size


def open_parquet(path: Path) -> Table:
    """Map a Parquet file into memory.

    Raises:
        DataError: it is no such file, or pyarrow is missing.
    """
    try:
        from pyarrow import ArrowInvalid
        from pyarrow import parquet as pq
    except ImportError as error:
        raise _missing_library("pyarrow", path) from error
    try:
        table = pq.read_table(path, memory_map=True)
    except (ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error

    def row(number: int) -> Row:
        values: Row = table.slice(number, 1).to_pylist()[0]
        return values

    return Table(
        *(table.num_rows, table.column_names, row),
        lambda start, stop: table.slice(start, stop - start).to_pylist(),
    )


def open_dataset(path: Path, folder: Path, config: str, split: str) -> Table:
    """Open the data set in a folder.

    Args:
        path: its name for messages.
        folder: where its files are.
        config: one of its configurations; empty: the only one, or its default.
        split: one of its splits, or a part of one; empty: the only one.

    Raises:
        DataError: it cannot be read, has no such configuration or split, or `datasets` is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise _missing_library("datasets", path) from error
    is_saved = any((folder / name).is_file() for name in _SAVED_BY_DATASETS)
    try:
        if is_saved:
            loaded = datasets.load_from_disk(str(folder))
        else:
            datasets.disable_progress_bars()
            loaded = datasets.load_dataset(str(folder), config or None, split=_part(split))
    except (datasets.exceptions.DatasetsError, ValueError, OSError, RuntimeError) as error:
        raise DataError(f"{path}: {explain_unread(error, folder)}") from error
    if is_saved and config:
        raise DataError(f"{path}: this dataset was saved to disk and has no configurations; leave out {config!r}")
    dataset = _one_split(path, loaded, split) if isinstance(loaded, datasets.DatasetDict) else loaded
    if is_saved and split and dataset is loaded:
        raise DataError(f"{path}: this dataset has no splits; leave out #{split}")
    stored = dataset.with_format("arrow")
    return Table(
        *(len(dataset), dataset.column_names, dataset.__getitem__), lambda start, stop: stored[start:stop].to_pylist()
    )


def _part(split: str) -> str | None:
    """Return the expression for a part of a split, or for several splits; None for a whole split."""
    return split if "[" in split or "+" in split else None


def _one_split(path: Path, splits: Mapping[str, Any], split: str) -> Any:
    """Return a split by name; the only one without a name."""
    if not split and len(splits) == 1:
        return next(iter(splits.values()))
    if split not in splits:
        problem = f"no split {split!r}" if split else "several splits"
        raise DataError(
            f'{path}: {problem}; name one as split = "{next(iter(splits), "train")}", or as {path}#SPLIT; there are: '
            f"{', '.join(splits)}"
        )
    return splits[split]


def explain_unread(error: Exception, folder: Path | None = None) -> str:
    """Return in one line why a data set cannot be opened, with the names of configurations or splits that exist."""
    text = " ".join(str(error.__cause__ or error).split())
    if match := _CONFIGS.search(text):
        return f'name one of its configurations as config = "..."; there are: {match[1].replace(chr(39), "")}'
    if match := _SPLITS.search(text):
        return f"no split {match[1]}; there are: {match[2].replace(chr(39), '')}"
    return f"datasets cannot read it: {text.replace(str(folder), 'its folder') if folder else text}"


def _missing_library(library: str, path: Path) -> DataError:
    return DataError(f"{path}: reading it needs {library}, which is not installed: pip install 'penstock[data]'")
