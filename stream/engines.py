"""An operator's list of engines, beside those that the settings name: added and removed while the run goes on.

What is on it is the last word on each URL, so a removed engine stays on it: the settings may name it as well, and a
worker that starts later is to know. Added again, it is used again.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from msgspec import Struct

from stream.errors import PenstockError
from stream.link import LONGEST_WAIT_S, Link

MOST = 1000
"""URLs that the list holds; beyond, the oldest removals are forgotten."""


class EngineWord(Struct, frozen=True):
    """The last word on an engine."""

    url: str
    word: Literal["add", "remove"]
    by: str
    at: float
    """Unix time in seconds, by the server's clock."""


async def add_engine(link: Link, url: str, by: str) -> bool:
    """Let the run use an engine. Returns False where that was the last word on it already.

    Raises:
        PenstockError: there is no such run, or the list is full.
    """
    return await _say(link, url, "add", by)


async def remove_engine(link: Link, url: str, by: str) -> bool:
    """Let the run use an engine no more, whoever names it. Returns False where that was the last word on it already.

    Raises:
        PenstockError: there is no such run, or the list is full.
    """
    return await _say(link, url, "remove", by)


async def engine_words(link: Link) -> list[EngineWord]:
    """The list as it is now, in the order in which the words were said."""
    found: Any = await link.patiently(lambda: link.redis.xrevrange(link.key("engines"), count=1))
    return _words(found[0][1]) if found else []


async def follow_engine_words(link: Link) -> AsyncIterator[list[EngineWord]]:
    """The whole list whenever it has changed, for ever; first the one that there is, if there is any."""
    after = "0-0"
    while True:
        answer: Any = await link.patiently(
            lambda after=after: link.redis.xread({link.key("engines"): after}, block=int(1000 * LONGEST_WAIT_S))  # type: ignore[misc]
        )
        for _, entries in answer:
            entry, fields = entries[-1]
            after = entry.decode()
            yield _words(fields)


def engines_now(named: Sequence[str], words: Sequence[EngineWord]) -> tuple[str, ...]:
    """The engines of a run: those named elsewhere and those added, less those removed; each once, in that order."""
    removed = {word.url for word in words if word.word == "remove"}
    added = (word.url for word in words if word.word == "add")
    return tuple(dict.fromkeys(url for url in (*named, *added) if url not in removed))


async def _say(link: Link, url: str, word: Literal["add", "remove"], by: str) -> bool:
    (status,) = await link.script("engine", url, word, by, MOST)
    if status == -2:
        raise PenstockError(f"the server knows no run called {link.run!r}")
    if status == -3:
        raise PenstockError(f"run {link.run!r} has {MOST} engines on its list; remove one first")
    return bool(status)


def _words(fields: dict[bytes, bytes]) -> list[EngineWord]:
    found = []
    for url, said in fields.items():
        word, at_ms, by = said.decode(errors="replace").split(" ", 2)
        found.append(
            EngineWord(url.decode(errors="replace"), "add" if word == "add" else "remove", by, int(at_ms) / 1000)
        )
    return found
