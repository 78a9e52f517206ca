"""Groups that are sampled and have no outcome yet. Changes nothing."""

import re
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import anyio.to_thread
from msgspec import Struct

from stream.codec import decode_group
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError, RecordError
from stream.queue.entry_scan import read_payload, scan_stage
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
            group = await _find_group(connection, stage, entry_id)
            if group is not None:
                yield stage, group


class UnfinishedPage(Struct, frozen=True):
    """Some groups of one stage, the newest first."""

    groups: list[Group]
    next_before: str
    """Id of the entry before which older ones follow; empty: there are none."""


async def read_newest_unfinished(
    connection: RunConnection, stage: UnfinishedStage, before: str, count: int, seconds: float
) -> UnfinishedPage:
    """Read groups of one stage that have no outcome, the newest first.

    Args:
        connection: to the run.
        stage: where the groups wait.
        before: id of an entry; only older ones are read. Empty: all.
        count: the most groups to read.
        seconds: read no further group after this time: one may have many megabytes.
    """
    if before and not re.fullmatch(r"[0-9]{1,19}-[0-9]{1,19}", before):
        raise PenstockError(f"{before!r} is no id of an entry")
    groups: list[Group] = []
    deadline = time.monotonic() + seconds
    while len(groups) < count and (not groups or time.monotonic() < deadline):
        newest = f"({before}" if before else "+"
        found: Any = await connection.with_retry(
            lambda newest=newest: connection.redis.xrevrange(connection.key(stage), newest, "-", count=1)  # type: ignore[misc]
        )
        if not found:
            return UnfinishedPage(groups, "")
        before = found[0][0].decode()
        if stage == "scored" and await connection.with_retry(
            lambda entry=before: connection.redis.hexists(connection.key("scored:marked"), entry)  # type: ignore[misc]
        ):
            continue
        group = await _read_group(connection, stage, found)
        if group is not None:
            groups.append(group)
    return UnfinishedPage(groups, before)


async def find_unfinished_group(connection: RunConnection, prompt: str) -> tuple[UnfinishedStage, Group] | None:
    """Return the group of a prompt that has no outcome, and its stage; None if it is not sampled, or has ended."""
    current: Any = await connection.with_retry(lambda: connection.redis.hget(connection.key("unfinished"), prompt))
    stage, _, entry_id = (current or b"").decode().rpartition(":")
    stages: tuple[UnfinishedStage, ...] = ("scored", "groups")
    for known in stages:
        if stage == known:
            group = await _find_group(connection, known, entry_id)
            return None if group is None else (known, group)
    return None


async def newest_scored_group(connection: RunConnection) -> Group | None:
    """Return the group that was scored last, ended or not; None if none is left on the server."""
    found: Any = await connection.with_retry(
        lambda: connection.redis.xrevrange(connection.key("scored"), "+", "-", count=1)
    )
    return await _read_group(connection, "scored", found)


async def _find_group(connection: RunConnection, stage: UnfinishedStage, entry_id: str) -> Group | None:
    found: Any = await connection.with_retry(
        lambda: connection.redis.xrange(connection.key(stage), entry_id, entry_id, count=1)
    )
    return await _read_group(connection, stage, found)


async def _read_group(connection: RunConnection, stage: UnfinishedStage, found: Any) -> Group | None:
    """Return the group of the first entry that was found; None if there is none, or it cannot be read."""
    if not found:
        return None
    entry_id, fields = found[0]
    payload = fields.get(b"payload") or await read_payload(connection, stage, entry_id.decode())
    return await anyio.to_thread.run_sync(_decode_group, payload or b"", fields.get(b"scores", b""))


def _decode_group(payload: bytes, scores: bytes) -> Group | None:
    try:
        return decode_group(payload, scores)
    except RecordError:
        return None
