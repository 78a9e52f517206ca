"""Turns rows of prompt files into prompts."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from envs.messages import is_empty_prompt
from stream.errors import DataError
from stream.records import Message, Prompt
from workers.datasets.sources import default_dataset_name
from workers.settings import Settings

_ENVIRONMENT = "environment"
_SEED_MASK = 0x7FFF_FFFF
"""Seeds have 31 bits, which the generators of all libraries accept."""


def prompt_id(dataset: str, epoch: int, row: int) -> str:
    """Return the id of a row's prompt, which is the same in every attempt and after every restart."""
    return f"{dataset}:{epoch}:{row}"


def row_to_prompt(row: Mapping[str, Any], number: int, epoch: int, *, settings: Settings, dataset: str = "") -> Prompt:
    """Turn a row into a prompt.

    Args:
        row: columns by name.
        number: index of the row in the file, from 0.
        epoch: from 0.
        settings: names of columns, environments, group size, seed.
        dataset: name of the dataset; empty: the name of its file or folder.

    Raises:
        DataError: the row has no usable prompt, lacks a column, names an unknown environment, or has a value that
        cannot
            be stored in a record.

    Example:
        `{"prompt": "2 + 2?", "answer": "4"}` of `train.jsonl`, row 17, becomes
        `Prompt(id="train:0:17", messages=[{"role": "user", "content": "2 + 2?"}], fields={"answer": "4"}, ...)`.
    """
    place = f"{settings.data.path}: row {number}"
    messages, is_text = _messages(row.get(settings.data.prompt), settings, place)
    fields = _fields(row, settings, place)
    environment = _environment(fields, settings, place)
    name = prompt_id(dataset or default_dataset_name(settings.data.path), epoch, number)
    return Prompt(
        id=name,
        messages=messages,
        is_plain_text=is_text,
        fields={column: _storable(value, column, place) for column, value in fields.items()},
        environment=environment,
        group_size=settings.rollout.group_size,
        epoch=epoch,
        row=number,
        seed=_seed(settings.run.seed, name),
    )


def _messages(value: Any, settings: Settings, place: str) -> tuple[list[Message], bool]:
    """Return the prompt column as messages, and whether it was plain text."""
    column = settings.data.prompt
    system: list[Message] = [{"role": "system", "content": settings.data.system}] if settings.data.system else []
    if not column:  # the environment's observation is appended to it
        return [*system, {"role": "user", "content": ""}], False
    if isinstance(value, str) and value.strip():
        return [*system, {"role": "user", "content": str(_storable(value, column, place))}], True
    if value is None or value in ("", []) or isinstance(value, str):
        raise DataError(f"{place}: column {column!r} is missing or empty; data.prompt names the column with the prompt")
    if not isinstance(value, list):
        raise DataError(f"{place}: column {column!r} is {type(value).__name__}, neither text nor a list of messages")
    messages = [_message(message, position, column, place) for position, message in enumerate(value)]
    if is_empty_prompt(messages):
        raise DataError(
            f"{place}: the messages of column {column!r} are empty; data.prompt names the column with the prompt"
        )
    return ([*system, *messages] if messages[0]["role"] != "system" else messages), False


def _message(value: Any, position: int, column: str, place: str) -> Message:
    where = f"{place}: message {position} of column {column!r}"
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {type(value).__name__}, not an object with 'role' and 'content'")
    # Columnar formats give each message the keys of all messages, with None as the value of missing ones.
    message = {key: item for key, item in value.items() if item is not None}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where} has no 'role'")
    if not isinstance(message.get("content", "" if message.get("tool_calls") else None), str | list):
        raise DataError(f"{where} has no 'content' that is text or a list of parts")
    return {key: _storable(item, column, place) for key, item in message.items()}


def _fields(row: Mapping[str, Any], settings: Settings, place: str) -> dict[str, Any]:
    """Return all columns except the prompt, renamed by `data.columns`."""
    renames = settings.data.columns
    for name, column in renames.items():
        if column not in row:
            raise DataError(
                f"{place}: no column {column!r}, which data.columns calls {name!r}; there are: {_names(row)}"
            )
        if name in row and name != column and name not in renames.values() and name != settings.data.prompt:
            raise DataError(f"{place}: data.columns calls {column!r} {name!r}, but there is a column of that name too")
    taken = {settings.data.prompt, *renames.values()}
    fields = {column: value for column, value in row.items() if column not in taken}
    return fields | {name: row[column] for name, column in renames.items()}


def _environment(fields: dict[str, Any], settings: Settings, place: str) -> str | None:
    """Remove and return the environment that the row names; the first one if it names none."""
    if not settings.environments:
        return None
    name = fields.pop(_ENVIRONMENT, None)
    if name is None:
        return next(iter(settings.environments))
    if not isinstance(name, str) or name not in settings.environments:
        raise DataError(
            f"{place}: environment {name!r} is unknown; [environments] has: {_names(settings.environments)}"
        )
    return name


def _seed(run_seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{run_seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK


def _storable(value: Any, column: str, place: str) -> Any:
    """Convert scalars and arrays of numpy and pyarrow to Python's types, which a record can store."""
    try:
        plain = _plain(value)
        msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{place}: column {column!r} has a value that cannot be stored: {error}") from error
    return plain


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float | bytes):
        item = getattr(value, "item", None)  # numpy's float64 and str_ are a float and a str
        return item() if callable(item) else value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for conversion in ("as_py", "tolist"):
        convert = getattr(value, conversion, None)
        if callable(convert):
            return _plain(convert())
    return value


def _names(mapping: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, mapping))
