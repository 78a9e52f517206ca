"""Pacing, as those see it who mind the age of what is under way."""

from collections.abc import AsyncIterator
from typing import Any

from stream.connection.run_connection import MAX_BLOCK_S, RunConnection


async def inflight_versions(connection: RunConnection) -> dict[str, int]:
    """The policy version at which each outstanding group was begun, by prompt id.

    Those that come again after they had ended (a trainer resumed, a dead letter revived) are not among them.
    """
    found: Any = await connection.with_retry(
        lambda: connection.redis.zrange(connection.key("inflight_versions"), 0, -1, withscores=True)
    )
    return {prompt.decode(errors="replace"): int(version) for prompt, version in found}


async def watch_versions(connection: RunConnection) -> AsyncIterator[int]:
    """Each policy version at the moment it is published, for ever; first the one that there is.

    Who is slow may miss some, never the last.
    """
    after = "0-0"
    while True:
        answer: Any = await connection.with_retry(
            lambda after=after: connection.redis.xread(
                {connection.key("published"): after}, block=int(1000 * MAX_BLOCK_S)
            )  # type: ignore[misc]
        )
        for _, entries in answer:
            for entry, fields in entries:
                after = entry.decode()
                yield int(fields[b"version"])
