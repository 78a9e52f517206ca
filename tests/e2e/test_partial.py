"""`rollout.resume`: a worker is killed when all but one completion of a group are finished."""

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.queue.feed import Feed
from tests.e2e.by_hand import cast, feed, groups_in, until
from tests.scripted_engine.engine import ScriptedEngine

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("preloaded")]

SIZE = 4
MISSING = SIZE - 1
"""Number of the request that stays unanswered: the fourth."""


async def test_the_next_worker_samples_only_the_missing_completions(project, redis_url, run_name, tmp_path):
    project.table["run"]["name"] = run_name
    project.table["rollout"] |= {"group_size": SIZE}
    project.table["filter"] = {"zero_variance": False}
    project.table["queue"]["lease_s"] = 1.0
    file = str(await anyio.to_thread.run_sync(project.write))
    async with (
        connect(redis_url, run_name, reconnect_s=30.0) as connection,
        ScriptedEngine(lambda ids, _: ids[:3], version="0") as engine,
        cast(tmp_path) as roles,
    ):
        engine.faults = lambda number, _request: "hang" if number == MISSING else None
        addresses = ("--redis", redis_url, "--engine", engine.url)
        await feed(connection, "a", group_size=SIZE)
        killed = await roles.start(project.command("rollout", file, *addresses))
        ((entry, _),) = await connection.redis.xrange(connection.key("prompts"))
        kept = connection.key(f"prompts:partials:{entry.decode()}")

        async def all_but_one() -> bool:
            return await connection.redis.hlen(kept) == SIZE - 1

        async def settled() -> bool:
            return bool(await connection.redis.xlen(connection.key("groups")))

        await until(connection, all_but_one)
        killed.kill()
        await killed.ended()
        assert engine.request_count == SIZE
        # The policy has advanced: new completions need at least the new version, finished ones keep theirs.
        engine.version = "3"
        await connection.redis.hset(connection.key("policy"), "version", 3)

        heir = await roles.start(project.command("rollout", file, *addresses))
        await until(connection, settled)
        assert engine.request_count == SIZE + 1, "it sampled what was missing, and nothing else"
        (group,) = await groups_in(connection, "groups")
        assert f"-{heir.pid}-" in group.worker
        assert group.attempt == 1
        assert [c.index for c in group.completions] == list(range(SIZE))
        versions = [span.version for c in group.completions for row in c.rows for span in row.spans]
        assert sorted(versions) == [0] * (SIZE - 1) + [3]
        assert not await connection.redis.exists(kept), "the server's memory is free"

        await Feed(connection, 1000).finish()
        await roles.start(project.command("score", file, "--redis", redis_url))
        trainer = await roles.start(project.command("train", file, *addresses))
        assert await trainer.ended() == 0, trainer.said()
    (line,) = await anyio.to_thread.run_sync(project.ledger)
    assert (line["prompt"], line["outcome"]) == ("a", "trained")
