"""Groups that are sampled and have no outcome yet. Changes nothing."""

from collections.abc import AsyncIterator
from typing import Any, Literal

import anyio.to_thread

from stream.codec import decode
from stream.connection.run_connection import RunConnection
from stream.errors import RecordError
from stream.queue.entry_scan import scan_stage
from stream.records import Group

UnfinishedStage = Literal["scored", "groups"]


async def unfinished_groups(connection: RunConnection) -> AsyncIterator[tuple[UnfinishedStage, Group]]:
    """Yield groups that wait for the trainer, then groups that wait for their rewards, each the newest first.

    A group that moves or ends meanwhile may be missing. Entries that cannot be read are left out.
    """
    stages: tuple[UnfinishedStage, ...] = ("scored", "groups")
    for stage in stages:
        ids = [entry.id async for entry in scan_stage(connection, stage) if not entry.marked]
        for entry_id in reversed(ids):
            group = await _read_group(connection, stage, entry_id)
            if group is not None:
                yield stage, group


async def newest_scored_group(connection: RunConnection) -> Group | None:
    """Return the group that was scored last, ended or not; None if none is left on the server."""
    found: Any = await connection.with_retry(
        lambda: connection.redis.xrevrange(connection.key("scored"), "+", "-", count=1)
    )
    return await anyio.to_thread.run_sync(_decode_group, found)


async def _read_group(connection: RunConnection, stage: UnfinishedStage, entry_id: str) -> Group | None:
    found: Any = await connection.with_retry(
        lambda: connection.redis.xrange(connection.key(stage), entry_id, entry_id, count=1)
    )
    return await anyio.to_thread.run_sync(_decode_group, found)


def _decode_group(found: Any) -> Group | None:
    try:
        return decode(found[0][1][b"payload"], Group) if found else None
    except (RecordError, KeyError):
        return None
