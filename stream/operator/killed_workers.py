"""Give back the work of a worker that was killed from outside, without charging it to the prompts."""

from stream.connection.run_connection import RunConnection


async def release_worker(connection: RunConnection, host: str, pid: int) -> int:
    """Give back all entries that a worker held; other workers may claim them at once.

    An entry whose lease expires is charged a failure, because it may have ended its worker. Call this if it did not:
    the supervisor knows which of its processes were killed from outside.

    Args:
        connection: to the run.
        host: where the worker ran, as in its consumer name.
        pid: its process id; the process has ended.

    Returns:
        The number of entries.
    """
    released: int = await connection.run_script("release_worker", f"-{host}-{pid}-")
    return released
