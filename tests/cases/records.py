"""What stands on a server: all of a run's keys, and who owns the records of groups."""

from stream.connection.keys import EVALUATION_STAGES, PROMPT_STAGES, STAGES
from stream.connection.run_connection import RunConnection


async def assert_records_are_owned(connection: RunConnection) -> int:
    """Assert that each record has one owner, and each entry of groups a record; return the number of records."""
    redis, owned = connection.redis, set()
    for stream in {*STAGES, *EVALUATION_STAGES, "dead"} - set(PROMPT_STAGES):
        for entry_id, fields in await redis.xrange(connection.key(stream)):
            key = connection.key(f"{stream}:payload:{entry_id.decode()}").encode()
            has_own = b"payload" in fields or b"f:payload" in fields
            assert has_own or stream == "dead" or await redis.exists(key), (stream, fields)
            owned.add(key)
    pattern = connection.key("*").replace("[", "\\[")
    found = {key async for key in redis.scan_iter(match=pattern, count=5000)}
    records = {key for key in found if b":payload:" in key}
    assert records <= owned, records - owned
    assert not {key for key in found if b":incoming:" in key}
    return len(records)


async def dumped(connection: RunConnection) -> dict[bytes, bytes | None]:
    """Return each key of this run with its serialized value."""
    keys = sorted([key async for key in connection.redis.scan_iter(f"{{{connection.run}}}*")])
    return {key: await connection.redis.dump(key) for key in keys}
