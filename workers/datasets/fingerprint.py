"""The rows that a run knows: a data set that is changed between two starts would feed rows twice, or never.

Rows are compared by what they mean, so a file may be written anew in another way. Files whose bytes are those of the
run's first start are not read row by row.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from stream.connection.run_identity import FILES
from stream.errors import DataError
from workers.datasets.mix import Dataset, dataset_name, open_dataset_mix
from workers.datasets.sources import files_fingerprint
from workers.settings import Settings

_ROWS: Final = "data.rows."


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
