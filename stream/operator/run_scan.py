"""What the server knows of each prompt, by id: read in small batches, nothing changed.

Prompts move while they are looked at, down the stream. So what they pass first is read first: one that moves meanwhile
may be seen twice, and is never missed. The ledger comes last, after all of this.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Literal

from msgspec import Struct, field
from redis.asyncio import Redis

from stream.connection.keys import EVALUATION_STAGES, STAGES
from stream.connection.run_connection import RunConnection
from stream.operator.run_status import read_status

_ENTRIES_PER_SCRIPT = 64
"""In one script: their payloads, which it must read to get at the ids, may be megabytes each."""
_IDS_PER_SCAN = 1000


class StreamEntry(Struct, frozen=True):
    """A stream's entry, without its payload."""

    stage: str
    id: str
    prompt: str
    """Empty for foreign junk that bears none."""
    marked: bool = False
    """By a trainer, and not yet acknowledged."""


class DeadEntry(Struct, frozen=True):
    """A dead letter, without its payload."""

    id: str
    stage: str
    prompt: str
    reason: str
    error: str
    ends_prompt: bool
    """It is the end of one of the run's prompts; False for junk, and for second copies."""


class RunScan(Struct, kw_only=True):
    """All that a server knows of a run's prompts."""

    cursor: str = ""
    """Where the feeder stood before anything else was read."""
    data_fingerprint: str = ""
    """The prompt file's fingerprint when it was fed; empty where nobody said."""
    unfinished: set[str] = field(default_factory=set)
    """Prompts without an end, as the server sees it."""
    entries: list[StreamEntry] = field(default_factory=list)
    dead: list[DeadEntry] = field(default_factory=list)
    dropped_dead: set[str] = field(default_factory=set)
    """Prompts whose dead letters the operator dropped."""


async def scan_run(connection: RunConnection) -> RunScan:
    """Read where a run's prompts are.

    Raises:
        PenstockError: the server knows no run of that name.
    """
    view = await read_status(connection)
    census = RunScan(cursor=view.feed.get("cursor", ""), data_fingerprint=view.meta.get("data", ""))
    census.unfinished = await _members(connection, "unfinished", Redis.hscan)
    for stage in STAGES:
        async for entry, marked, (prompt,) in _scan_entries(connection, stage, "prompt"):
            census.entries.append(StreamEntry(stage, entry, prompt, marked))
    census.dead = await scan_dead_entries(connection)
    census.dropped_dead = await _members(connection, "dropped_dead", Redis.sscan)
    return census


async def scan_dead_entries(connection: RunConnection) -> list[DeadEntry]:
    """All dead letters, without their payloads; those of evaluations are no prompts of the run."""
    fields = ("stage", "prompt", "reason", "error", "ends_prompt")
    return [
        DeadEntry(letter, came_from, prompt, reason, error, fed == "1")
        async for letter, _, (came_from, prompt, reason, error, fed) in _scan_entries(connection, "dead", *fields)
        if came_from not in EVALUATION_STAGES
    ]


async def _scan_entries(
    connection: RunConnection, stream: Literal["prompts", "groups", "scored", "dead"], *fields: str
) -> AsyncIterator[tuple[str, bool, list[str]]]:
    """Each entry's id, whether it is marked, and some of its fields."""
    after = "-"
    while batch := await connection.run_script("scan_entries", stream, after, _ENTRIES_PER_SCRIPT, *fields):
        for entry_id, marked, *values in batch:
            after = entry_id.decode()
            yield after, bool(marked), [value.decode(errors="replace") for value in values]


async def _members(connection: RunConnection, name: str, scan: Callable[..., Any]) -> set[str]:
    """Members of a set, or keys of a hash: those that are there all the while that they are read, and others."""
    found: set[str] = set()
    cursor = 0
    while True:
        answer: Any = await connection.with_retry(partial(_scan, connection, name, scan, cursor))
        cursor, members = answer
        found |= {member.decode(errors="replace") for member in members}
        if not cursor:
            return found


def _scan(connection: RunConnection, name: str, scan: Callable[..., Any], cursor: int) -> Awaitable[Any]:
    found: Awaitable[Any] = scan(connection.redis, connection.key(name), cursor, count=_IDS_PER_SCAN)
    return found
