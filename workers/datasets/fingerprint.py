"""The rows that a run knows: a data set that is changed between two starts would feed rows twice, or never.

Rows are compared by what they mean, so a file may be written anew in another way. Rows that were added at the end may
be accepted; they are fed after all others. Files whose bytes are those of the last comparison are not read row by row.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from stream.connection.run_identity import AcceptedChange
from stream.errors import DataError, RunMismatchError
from workers.datasets.mix import Dataset, open_dataset_mix
from workers.datasets.sources import default_dataset_name, files_fingerprint
from workers.settings import Settings
from workers.settings.data import DatasetSettings

AcceptData = Literal["", "appended"]
_PREFIX: Final = "data.rows."


class DatasetRows(Struct, frozen=True):
    """The rows of a data set that a run knows."""

    lengths: tuple[int, ...] = ()
    """Number of rows at the run's birth, and after each extension that was accepted."""
    digests: tuple[str, ...] = ()
    """Digest of that many rows."""


class PinnedData(Struct, frozen=True, kw_only=True):
    """The data sets of a run, compared with those that it knows."""

    pinned: dict[str, str]
    changes: tuple[AcceptedChange, ...] = ()
    """Extensions that were accepted."""
    files: dict[str, str]
    """For each data set, a digest of its files and one of the rows that they hold; compared with nothing else."""


def is_rows(name: str) -> bool:
    """Return whether a pinned value is of a data set's rows."""
    return name.startswith(_PREFIX)


def dataset_lengths(pinned: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return how many rows each data set had at the run's birth and after each extension."""
    return {name.removeprefix(_PREFIX): rows.lengths for name, rows in _decode(pinned).items()}


def dataset_name(dataset: DatasetSettings) -> str:
    """Return the name of a data set, which is a part of its prompts' ids."""
    return dataset.name or default_dataset_name(dataset.source)


def pinned_data(
    settings: Settings, stored: Mapping[str, str], accept: AcceptData = "", files: Mapping[str, str] | None = None
) -> PinnedData:
    """Compare the data sets with the stored ones. Reads files, row by row only if their bytes are others.

    Args:
        settings: of the run.
        stored: pinned values.
        accept: `appended`: accept rows that were added at the end.
        files: `PinnedData.files` of the last comparison.

    Raises:
        RunMismatchError: rows were changed, removed, or added without being accepted.
        DataError: a data set cannot be read.
    """
    known = _decode(stored)
    names = {_PREFIX + dataset_name(each): each.source for each in settings.datasets}
    try:
        digests = {name: files_fingerprint(path) for name, path in names.items()}
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; data.path names the prompts") from error
    if files and all(name in known and files.get(name) == _checked(digests[name], known[name]) for name in names):
        return PinnedData(pinned={name: stored[name] for name in names}, files={name: files[name] for name in names})
    problems, found = [], {}
    for dataset, name in zip(open_dataset_mix(settings).datasets, names, strict=True):
        try:
            found[name] = _extend(dataset, known.get(name, DatasetRows()), accept)
        except RunMismatchError as error:
            problems.append(str(error))
    if problems:
        raise RunMismatchError(
            f"the data of run {settings.run.name!r} changed: {'; '.join(problems)}. Restore the file, or give this run "
            "another run.name"
        )
    pinned, changes = _pin_rows(found, known)
    return PinnedData(
        pinned=pinned, changes=changes, files={name: _checked(digests[name], rows) for name, rows in found.items()}
    )


def are_known(datasets: Sequence[Dataset], pinned: Mapping[str, str]) -> bool:
    """Return whether data sets hold the rows that a run knows, and no others. Reads all rows."""
    known = _decode(pinned)
    rows = [(dataset.source, known.get(_PREFIX + dataset.name)) for dataset in datasets]
    return all(
        stored is not None
        and len(source) == stored.lengths[-1]
        and source.row_digests(stored.lengths) == list(stored.digests)
        for source, stored in rows
    )


def _checked(files: str, rows: DatasetRows) -> str:
    """Return what is kept of a comparison: these bytes hold these rows."""
    return f"{files} {rows.digests[-1]}"


def _extend(dataset: Dataset, before: DatasetRows, accept: AcceptData) -> DatasetRows:
    """Return the known rows with one more length, that of now.

    Raises:
        RunMismatchError: the known rows are not the first ones now, or others follow that are not accepted.
    """
    path, size = dataset.settings.data.path, len(dataset.source)
    known = max(before.lengths, default=0)
    if size < known:
        raise RunMismatchError(f"{path} has {size} rows now, and had {known}")
    lengths = (*before.lengths, size)
    digests = tuple(dataset.source.row_digests(lengths))
    if digests[:-1] != before.digests:
        raise RunMismatchError(f"some of the first {known} rows of {path} are not those that the run began with")
    if before.lengths and size > known and accept != "appended":
        raise RunMismatchError(
            f"{path} has {size} rows now, and had {known}: {size - known} were added at the end, which --accept-data "
            "appended accepts"
        )
    return DatasetRows(lengths, digests)


def _pin_rows(
    found: Mapping[str, DatasetRows], known: Mapping[str, DatasetRows]
) -> tuple[dict[str, str], tuple[AcceptedChange, ...]]:
    """Return what to pin: an extension of one data set adds a length to all, so that all have equally many."""
    is_extended = any(name in known and rows.lengths[-1] > known[name].lengths[-1] for name, rows in found.items())
    pinned, changes = {}, []
    for name, rows in found.items():
        if name in known and not is_extended:
            rows = DatasetRows(rows.lengths[:-1], rows.digests[:-1])  # noqa: PLW2901
        pinned[name] = _encode(rows)
        if name in known and is_extended:
            changes.append(AcceptedChange.now(name, _encode(known[name]), pinned[name]))
    return pinned, tuple(changes)


def _encode(rows: DatasetRows) -> str:
    return msgspec.json.encode(rows).decode()


def _decode(pinned: Mapping[str, str]) -> dict[str, DatasetRows]:
    return {name: msgspec.json.decode(text, type=DatasetRows) for name, text in pinned.items() if is_rows(name)}
