"""Reads the rows of prompt files by index: JSONL, Parquet, or a Hugging Face dataset on disk.

In place of a row that cannot be read, a source yields a `DataError` with file, line and reason, so that the feeder
skips this row and feeds the others.
"""

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stream.errors import DataError
from workers.datasets.tables import Row, Table, open_dataset, open_parquet
from workers.settings import DataSettings
from workers.settings.data import ENVIRONMENT_ROWS, GENERATED, with_split
from workers.settings.hub import is_hub_name, local_folder, parse_revision

_BLOCK = 1 << 20
"""Bytes of a file that a digest reads at a time."""
_ROWS_AT_ONCE = 1000
"""Rows of a table that a digest decodes at a time."""
_UNREADABLE = (ValueError, TypeError, OSError, OverflowError)
"""Errors that one row of a table may raise, for example for a timestamp out of range or a broken image."""


class Source(Protocol):
    """The rows of one prompt file, numbered from 0."""

    def __len__(self) -> int:
        """Return the number of rows, including rows that cannot be read."""

    def read_rows(self, numbers: Iterable[int]) -> Iterator[tuple[int, Row | DataError]]:
        """Yield each number with its row, in the order of `numbers`; an error in place of a row that cannot be read."""

    def fingerprint(self) -> str:
        """Return a digest of the names and bytes of the files."""

    def row_digest(self) -> str:
        """Return a digest of the rows' values; it ignores white space, the order of keys, and the file format."""


def open_source(data: DataSettings, setting: str = "data.path") -> Source:
    """Open the file or folder that `data.path` names, or the data set of the hub that is in the cache.

    One of several splits is opened as `path/to/folder#split`, or by `data.split`.

    Args:
        data: path, configuration, split, revision, and the name of the prompt column.
        setting: the name of the setting with the path, for error messages.

    Raises:
        DataError: there is no such file, its format is unknown, or the library that reads it is missing.
    """
    if data.path.startswith(GENERATED):
        return GeneratedSource(int(data.path.removeprefix(GENERATED)))
    path, split = _split_path(with_split(data.path, data.split))
    folder = local_folder(str(path), data.revision, "dataset")
    if folder.is_dir():
        return TableSource(data, open_dataset(path, folder, data.config, split), path)
    if not path.is_file():
        if is_hub_name(str(path)) and parse_revision(data.revision).commit:
            raise DataError(f"{data.path} is not in the cache of this machine; `penstock check FILE` downloads it")
        raise DataError(f"{data.path}: no such file or folder; {setting} names the prompts")
    if split or data.config:
        raise DataError(f"{path} is one file, which has no splits and configurations; leave out {split or data.config}")
    if path.suffix == ".jsonl":
        return JsonLinesSource(data, path)
    if path.suffix == ".parquet":
        return TableSource(data, open_parquet(path), path)
    raise DataError(f"{data.path}: prompts come from a .jsonl or .parquet file, or a dataset saved to a folder")


def first_environment_row(path: str) -> Row:
    """Return the first row of the file with an environment's `rows()`; an empty row if there is no file yet."""
    file, _ = _split_path(path)
    if not file.is_file():
        return {}
    with file.open("rb") as opened:
        row: Row = msgspec.json.decode(opened.readline() or b"{}")
    return row


@lru_cache(maxsize=8)
def epoch_order(size: int, epoch: int, seed: int, shuffle: bool) -> Sequence[int]:
    """Return the row indices of an epoch in feeding order: the same on every machine and in every process."""
    if not shuffle:
        return range(size)
    numbers = array("q", range(size))
    draw = random.Random(f"{seed}:{epoch}").random  # the only method whose results are the same in every Python
    for last in range(size - 1, 0, -1):
        other = int(draw() * (last + 1))
        numbers[last], numbers[other] = numbers[other], numbers[last]
    return numbers


def default_dataset_name(path: str) -> str:
    """Return a data set's name in the ids of its prompts: the file's stem, or the folder's name with its split."""
    if path.startswith(GENERATED):
        return GENERATED.removesuffix(":")
    place, split = _split_path(path)
    return (place.stem if place.suffix in {".jsonl", ".parquet"} else place.name) + (f"#{split}" if split else "")


class GeneratedSource:
    """Rows without columns, for environments that make each problem from the seed of its prompt."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def read_rows(self, numbers: Iterable[int]) -> Iterator[tuple[int, Row | DataError]]:
        """See `Source.read_rows`."""
        return ((number, {}) for number in numbers)

    def fingerprint(self) -> str:
        """See `Source.fingerprint`."""
        return files_fingerprint(f"{GENERATED}{self._size}")

    def row_digest(self) -> str:
        """See `Source.row_digest`."""
        return _digest_rows({} for _ in range(self._size))


class JsonLinesSource:
    """One JSON object per line; blank lines are not rows."""

    def __init__(self, data: DataSettings, path: Path) -> None:
        self._prompt = data.prompt
        self._path = path
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        with path.open("rb") as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    self._offsets.append(offset)
                    self._lines.append(line)
                offset += len(text)

    def __len__(self) -> int:
        return len(self._offsets)

    def read_rows(self, numbers: Iterable[int]) -> Iterator[tuple[int, Row | DataError]]:
        """See `Source.read_rows`."""
        with self._path.open("rb") as file:
            for number in numbers:
                file.seek(self._offsets[number])
                yield number, self._read(file.readline(), number)

    def fingerprint(self) -> str:
        """See `Source.fingerprint`."""
        return _digest([self._path])

    def row_digest(self) -> str:
        """See `Source.row_digest`."""
        with self._path.open("rb") as file:
            return _digest_rows(_decode_or_raw(line) for line in file if line.strip())

    def _read(self, text: bytes, number: int) -> Row | DataError:
        place = f"{self._path}:{self._lines[number]}"
        try:
            value = _decode_line(text)
        except (ValueError, RecursionError) as error:
            return DataError(f"{place}: not JSON: {error}{_json_hint(text.strip())}")
        if not isinstance(value, dict):
            return DataError(f"{place}: a JSON {type(value).__name__}, not an object with columns")
        return _check_prompt(value, self._prompt, place)


def _json_hint(line: bytes) -> str:
    """Return the likely reason why a line is not JSON, with the remedy; empty if none is recognized."""
    if b"\x00" in line:
        return "; it looks like UTF-16: save the file as UTF-8"
    if line.startswith(b"[") or line == b"{":
        return "; each line must hold one whole row, {...}: a list, or an object over several lines, is not JSONL"
    return "; leave out the comma at the line's end" if line.endswith(b",") else ""


class TableSource:
    """Rows of a table in memory, or mapped into memory: Parquet and Hugging Face datasets."""

    def __init__(self, data: DataSettings, table: Table, path: Path) -> None:
        self._data = data
        self._prompt = data.prompt
        self._table = table
        self._path = path
        if len(table) and data.prompt and data.prompt not in table.columns:
            raise DataError(
                f"{data.path}: no column {data.prompt!r}; data.prompt names the column with the prompt; there are: "
                f"{', '.join(table.columns)}"
            )

    def __len__(self) -> int:
        return len(self._table)

    def read_rows(self, numbers: Iterable[int]) -> Iterator[tuple[int, Row | DataError]]:
        """See `Source.read_rows`."""
        for number in numbers:
            place = f"{self._path}: row {number}"
            try:
                yield number, _check_prompt(self._table.row(number), self._prompt, place)
            except _UNREADABLE as error:
                yield number, DataError(f"{place}: cannot be read: {error}")

    def fingerprint(self) -> str:
        """See `Source.fingerprint`."""
        return files_fingerprint(with_split(self._data.path, self._data.split), self._data.config, self._data.revision)

    def row_digest(self) -> str:
        """See `Source.row_digest`."""
        total = len(self)
        starts = range(0, total, _ROWS_AT_ONCE)
        return _digest_rows(
            row for start in starts for row in self._stored_rows(start, min(total, start + _ROWS_AT_ONCE))
        )

    def _stored_rows(self, start: int, stop: int) -> Sequence[Row | str]:
        """Return rows as they are stored; the text of the error in place of a row that cannot be read."""
        try:
            return self._table.values(start, stop)
        except _UNREADABLE as error:
            if stop - start == 1:
                return [f"{type(error).__name__}: {error}"]
        return [row for number in range(start, stop) for row in self._stored_rows(number, number + 1)]


def _check_prompt(row: Row, prompt: str, place: str) -> Row | DataError:
    """Return the row, or an error if its column `prompt` is missing or empty; without such a column any row passes."""
    value = row.get(prompt)
    if not prompt:
        return row
    if value is None:
        columns = ", ".join(row) or "none"
        return DataError(
            f"{place}: no column {prompt!r}; data.prompt names the column with the prompt; there are: {columns}. "
            'If the environment\'s reset makes the prompt, set data.prompt = ""'
        )
    if not (value.strip() if isinstance(value, str) else value):
        return DataError(
            f"{place}: the prompt in column {prompt!r} is empty. If the environment's reset makes the prompt, set "
            'data.prompt = ""'
        )
    return row


def _split_path(path: str) -> tuple[Path, str]:
    """Return the path and the split after its last `#`. If the whole path exists, its `#` is part of the name."""
    path = path.removeprefix(ENVIRONMENT_ROWS)
    whole = Path(path)
    folder, mark, split = path.rpartition("#")
    return (whole, "") if whole.exists() or not mark else (Path(folder), split)


def files_fingerprint(path: str, config: str = "", revision: str = "") -> str:
    """Return a digest of the names and contents of a prompt file, or of the files of a data set in a folder.

    The files of a data set on the hub are known by its commit, and not read.

    Raises:
        OSError: it cannot be read.
    """
    place, _ = _split_path(path)
    if path.startswith(GENERATED) or is_hub_name(str(place)):
        named = "\0".join(filter(None, (path, config, parse_revision(revision).commit)))
        return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
    if not place.is_dir():
        return _digest([place])
    return _digest(sorted(file for file in place.rglob("*") if file.is_file() and not file.name.startswith("cache-")))


def _decode_line(text: bytes) -> Any:
    return msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"))


def _decode_or_raw(line: bytes) -> Any:
    """Return the value of a line of JSON; the line itself, stripped, if it is not JSON."""
    try:
        return _decode_line(line)
    except (ValueError, RecursionError):
        return line.strip()


def _digest_rows(rows: Iterable[Any]) -> str:
    """Return a digest of rows by value; MessagePack distinguishes the same types as records, such as text and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    encode = msgspec.msgpack.Encoder(order="deterministic", enc_hook=repr).encode
    for value in rows:
        try:
            row = encode(value)
        except (ValueError, TypeError, OverflowError, RecursionError):  # a record cannot store it, so it is not fed
            row = b"\xc1" + repr(value).encode(errors="surrogatepass")  # a byte that MessagePack never uses
        digest.update(len(row).to_bytes(8) + row)
    return digest.hexdigest()


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()
