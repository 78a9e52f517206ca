"""An operator's list of engines, beside those that the settings name: added and removed while the run goes on.

What is on it is the last word on each URL, so a removed engine stays on it: the settings may name it as well, and a
worker that starts later is to know. Added again, it is used again.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from msgspec import Struct

from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.errors import PenstockError

MAX_ENGINES = 1000
"""URLs that the list holds; beyond, the oldest removals are forgotten."""


class EngineOverride(Struct, frozen=True):
    """The last word on an engine."""

    url: str
    action: Literal["add", "remove"]
    set_by: str
    set_at: float
    """Unix time in seconds, by the server's clock."""


async def add_engine(connection: RunConnection, url: str, by: str) -> bool:
    """Let the run use an engine. Returns False where that was the last word on it already.

    Raises:
        PenstockError: there is no such run, or the list is full.
    """
    return await _set_override(connection, url, "add", by)


async def remove_engine(connection: RunConnection, url: str, by: str) -> bool:
    """Let the run use an engine no more, whoever names it. Returns False where that was the last word on it already.

    Raises:
        PenstockError: there is no such run, or the list is full.
    """
    return await _set_override(connection, url, "remove", by)


async def read_engine_overrides(connection: RunConnection) -> list[EngineOverride]:
    """The list as it is now, in the order in which the words were said."""
    found: Any = await connection.with_retry(lambda: connection.redis.xrevrange(connection.key("engines"), count=1))
    return _parse_overrides(found[0][1]) if found else []


async def watch_engine_overrides(connection: RunConnection) -> AsyncIterator[list[EngineOverride]]:
    """The whole list whenever it has changed, for ever; first the one that there is, if there is any."""
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
    """The engines of a run: those named elsewhere and those added, less those removed; each once, in that order."""
    removed = {word.url for word in overrides if word.action == "remove"}
    added = (word.url for word in overrides if word.action == "add")
    return tuple(dict.fromkeys(url for url in (*configured, *added) if url not in removed))


async def _set_override(connection: RunConnection, url: str, action: Literal["add", "remove"], by: str) -> bool:
    (status,) = await connection.run_script("set_engine_override", url, action, by, MAX_ENGINES)
    if status == -2:
        raise PenstockError(f"the server knows no run called {connection.run!r}")
    if status == -3:
        raise PenstockError(f"run {connection.run!r} has {MAX_ENGINES} engines on its list; remove one first")
    return bool(status)


def _parse_overrides(fields: dict[bytes, bytes]) -> list[EngineOverride]:
    found = []
    for url, said in fields.items():
        word, at_ms, by = said.decode(errors="replace").split(" ", 2)
        found.append(
            EngineOverride(url.decode(errors="replace"), "add" if word == "add" else "remove", by, int(at_ms) / 1000)
        )
    return found
