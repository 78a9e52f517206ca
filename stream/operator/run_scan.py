"""What the server knows about each prompt of a run. Changes nothing.

Prompts move down the streams while they are read. The streams are therefore read in the order of the flow: a prompt
that moves meanwhile may be seen twice and is never missed. The ledger is read last, after all of this.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from msgspec import Struct, field
from redis.asyncio import Redis

from stream.connection.keys import STAGES
from stream.connection.run_connection import RunConnection
from stream.operator.run_status import read_status
from stream.queue.entry_scan import DeadEntry, StreamEntry, scan_dead_entries, scan_stage

_IDS_PER_SCAN = 1000


class RunScan(Struct, kw_only=True):
    """What the server knows about a run's prompts."""

    cursor: str = ""
    """The feeder's cursor before anything else was read."""
    data_fingerprint: str = ""
    """The fingerprint of the prompt file that was fed; empty if the feeder has not stored one."""
    rejected_rows: int = 0
    """Rows that the feeder passed by, because they are no prompts."""
    unfinished: set[str] = field(default_factory=set)
    """Prompts without an outcome on the server."""
    entries: list[StreamEntry] = field(default_factory=list)
    dead: list[DeadEntry] = field(default_factory=list)
    dropped_dead: set[str] = field(default_factory=set)
    """Prompts whose dead letters the operator dropped."""


async def scan_run(connection: RunConnection) -> RunScan:
    """Read where a run's prompts are.

    Raises:
        PenstockError: the server has no run of that name.
    """
    status = await read_status(connection)
    scan = RunScan(
        cursor=status.feed.get("cursor", ""),
        data_fingerprint=status.meta.get("data", ""),
        rejected_rows=int(status.feed.get("rejected_rows", 0)),
    )
    scan.unfinished = await _members(connection, "unfinished", Redis.hscan)
    for stage in STAGES:
        async for entry in scan_stage(connection, stage):
            scan.entries.append(entry)
    scan.dead = await scan_dead_entries(connection)
    scan.dropped_dead = await _members(connection, "dropped_dead", Redis.sscan)
    return scan


async def _members(connection: RunConnection, name: str, scan: Callable[..., Any]) -> set[str]:
    """Return the members of a set, or the fields of a hash. Those added or removed meanwhile may be missing."""
    found: set[str] = set()
    cursor = 0
    while True:
        answer: Any = await connection.with_retry(partial(_scan_once, connection, name, scan, cursor))
        cursor, members = answer
        found |= {member.decode(errors="replace") for member in members}
        if not cursor:
            return found


def _scan_once(connection: RunConnection, name: str, scan: Callable[..., Any], cursor: int) -> Awaitable[Any]:
    found: Awaitable[Any] = scan(connection.redis, connection.key(name), cursor, count=_IDS_PER_SCAN)
    return found
