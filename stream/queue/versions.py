"""Policy versions: the version at which each outstanding group was started, and each version as it is published."""

from collections.abc import AsyncIterator
from typing import Any

from stream.connection.run_connection import MAX_BLOCK_S, RunConnection


async def inflight_versions(connection: RunConnection) -> dict[str, int]:
    """Return the policy version at which each outstanding group was started, by prompt id.

    Groups that are delivered again after their prompt had ended (trainer resumed, dead letter retried) are not
    included.
    """
    found: Any = await connection.with_retry(
        lambda: connection.redis.zrange(connection.key("inflight_versions"), 0, -1, withscores=True)
    )
    return {prompt.decode(errors="replace"): int(version) for prompt, version in found}


async def watch_versions(connection: RunConnection) -> AsyncIterator[int]:
    """Yield the current policy version, then each new one as it is published, forever.

    A slow reader may miss versions, but never the last one.
    """
    after = "0-0"
    while True:
        answer: Any = await connection.with_retry(
            lambda after=after: connection.redis.xread(  # type: ignore[misc]
                {connection.key("published"): after}, block=int(1000 * MAX_BLOCK_S)
            )
        )
        for _, entries in answer:
            for entry, fields in entries:
                after = entry.decode()
                yield int(fields[b"version"])
