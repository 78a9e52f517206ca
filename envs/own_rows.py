"""The rows that an environment brings along: its optional method `rows()`."""

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from envs.call import error_cause, filter_kwargs
from envs.contract import offers_rows
from envs.factory import EnvironmentFactory, run_in_thread
from stream.errors import DataError

MAX_ROWS: Final = 1_000_000
"""Rows of one environment. They are held in memory once; larger sets belong in a file."""
NO_TOOL: Final = (
    "a method rows() that needs no argument is the environment's data, and no tool: if this one is meant for the "
    "model, give it another name"
)


def call_rows(factory: EnvironmentFactory, name: str, split: str, limit: int, timeout_s: float) -> list[bytes] | None:
    """Make an environment and call its `rows()`.

    Args:
        factory: makes the environment; it is closed afterwards.
        name: of the environment in the settings, for messages.
        split: `train` or `eval`, passed if the method has a parameter `split`; one without it has no held-out rows.
        limit: rows to take; 0: all.
        timeout_s: deadline of the call, including the iteration over what it returns.

    Returns:
        Each row as JSON; None if the environment has no `rows`, or none for this split.

    Raises:
        DataError: it raised, took too long, or a row is not a mapping of JSON values.
    """
    env: Any = factory.make()
    try:
        if not offers_rows(env):
            return None
        arguments = filter_kwargs(env.rows, {"split": split})
        if split != "train" and not arguments:
            return None
        found = run_in_thread(lambda: _take(env.rows(**arguments), limit), timeout_s, factory.ref)
    except Exception as error:
        raise _failed(name, f"rows() raised {type(error).__name__}: {error}; {NO_TOOL}", error) from error
    finally:
        factory.discard(env)
    if len(found) > MAX_ROWS:
        raise _failed(name, f"rows() has more than {MAX_ROWS:,} rows; write them to a file and name it in data.path")
    if not found:
        raise _failed(name, "rows() has no rows")
    return [_encode(row, f"environments.{name}: row {number} of rows()") for number, row in enumerate(found)]


def first_row(factory: EnvironmentFactory, name: str, timeout_s: float) -> dict[str, Any]:
    """Return the first row that an environment brings along; no columns if it brings none.

    Raises:
        DataError: see `call_rows`.
    """
    rows = call_rows(factory, name, "train", 1, timeout_s)
    return dict(json.loads(rows[0])) if rows else {}


def _take(value: Any, limit: int) -> Any:
    """Return the rows in a list; if `rows` is async, an awaitable of the list."""

    def take(rows: Iterable[Any]) -> list[Any]:
        return list(islice(rows, limit or MAX_ROWS + 1))

    async def wait() -> list[Any]:
        return take(await value)

    return wait() if hasattr(value, "__await__") else take(value)


def _encode(row: Any, place: str) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(f"{place} is {type(row).__name__}, not a mapping of columns; {NO_TOOL}")
    plain = dict(row)
    try:
        text = json.dumps(plain, allow_nan=False, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place} has a value that JSON cannot hold: {error}; return text, numbers, lists") from error
    return text.encode(errors="surrogatepass")


def _plain(value: Any) -> Any:
    """Convert scalars and arrays of numpy."""
    if callable(convert := getattr(value, "tolist", None)):
        return convert()
    raise TypeError(f"a value of type {type(value).__name__}")


def _failed(name: str, what: str, error: Exception | None = None) -> DataError:
    found = DataError(f"environments.{name}: {what}")
    if error is not None:
        found.cause = error_cause(error, f"environment {name}, rows")
    return found
