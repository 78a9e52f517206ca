"""Engine overrides: engines that an operator adds to a live run or removes from it, beside the engines in the settings.

There is one override per URL, the last one. A removed engine stays in the list, because the settings may name it too
and a worker that starts later must not use it. Adding it again makes it usable again.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from msgspec import Struct

from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.errors import NoRunError, PenstockError

MAX_ENGINES = 1000
"""The most URLs in the list; beyond that the oldest removals are deleted."""


class EngineOverride(Struct, frozen=True):
    """The operator's last decision about an engine."""

    url: str
    action: Literal["add", "remove"]
    set_by: str
    set_at: float
    """Unix time in seconds, by the server's clock."""


async def add_engine(connection: RunConnection, url: str, by: str) -> bool:
    """Let the run use an engine. Returns False if it is added already.

    Raises:
        PenstockError: there is no such run, or the list is full.
    """
    return await _set_override(connection, url, "add", by)


async def remove_engine(connection: RunConnection, url: str, by: str) -> bool:
    """Stop the run from using an engine, even if the settings name it. Returns False if it is removed already.

    Raises:
        PenstockError: there is no such run, or the list is full.
    """
    return await _set_override(connection, url, "remove", by)


async def read_engine_overrides(connection: RunConnection) -> list[EngineOverride]:
    """Return the overrides, oldest first."""
    found: Any = await connection.with_retry(lambda: connection.redis.xrevrange(connection.key("engines"), count=1))
    return _parse_overrides(found[0][1]) if found else []


async def watch_engine_overrides(connection: RunConnection) -> AsyncIterator[list[EngineOverride]]:
    """Yield the list of overrides, if there is one, and again after each change, forever."""
    after = "0-0"
    while True:
        answer: Any = await connection.with_retry(
            lambda after=after: connection.redis.xread(
                {connection.key("engines"): after}, block=int(1000 * MAX_BLOCK_S)
            )  # type: ignore[misc]
        )
        for _, entries in answer:
            entry, fields = entries[-1]
            after = entry.decode()
            yield _parse_overrides(fields)


def apply_engine_overrides(configured: Sequence[str], overrides: Sequence[EngineOverride]) -> tuple[str, ...]:
    """Return a run's engines: the configured ones, then the added ones, without the removed ones and duplicates."""
    removed = {override.url for override in overrides if override.action == "remove"}
    added = (override.url for override in overrides if override.action == "add")
    return tuple(dict.fromkeys(url for url in (*configured, *added) if url not in removed))


async def _set_override(connection: RunConnection, url: str, action: Literal["add", "remove"], by: str) -> bool:
    (status,) = await connection.run_script("set_engine_override", url, action, by, MAX_ENGINES)
    if status == -2:
        raise NoRunError(f"the server has no run named {connection.run!r}")
    if status == -3:
        raise PenstockError(f"run {connection.run!r} has {MAX_ENGINES} engines on its list; remove one first")
    return bool(status)


def _parse_overrides(fields: dict[bytes, bytes]) -> list[EngineOverride]:
    overrides = []
    for url, value in fields.items():
        action, at_ms, by = value.decode(errors="replace").split(" ", 2)
        overrides.append(
            EngineOverride(url.decode(errors="replace"), "add" if action == "add" else "remove", by, int(at_ms) / 1000)
        )
    return overrides
