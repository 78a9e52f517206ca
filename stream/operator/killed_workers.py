"""Give back the work of a worker whose process has ended, and count its death for what it held."""

from msgspec import Struct

from stream.connection.run_connection import RunConnection


class HeldEntry(Struct, frozen=True, kw_only=True):
    """An entry that a worker held when its process ended, if it did not only wait for its turn."""

    stage: str
    prompt_id: str
    deaths: int
    """Workers in a row that died while they held it."""
    is_charged: bool
    """The worker worked on nothing else, so its death is a failure of this entry."""
    is_dead: bool
    """The entry became a dead letter, because its failure limit was reached."""
    ran: str = ""
    """What the worker ran if the death is charged, for example `environment calculator`."""


async def release_worker(connection: RunConnection, host: str, pid: int, infra_limit: int, how: str) -> list[HeldEntry]:
    """Give back all entries that a worker held; other workers may claim them at once.

    The same happens, later, to entries whose lease expires.

    Args:
        connection: to the run.
        host: where the worker ran, as in its consumer name.
        pid: its process id; the process has ended.
        infra_limit: failures after which an entry becomes a dead letter.
        how: how the process ended, then the cause as `ErrorCause.render` writes it, for dead letters.

    Returns:
        What it held.
    """
    found = await connection.run_script("release_worker", f"-{host}-{pid}-", infra_limit, how[:4000])
    return [
        HeldEntry(
            stage=stage.decode(),
            prompt_id=prompt.decode(errors="replace"),
            deaths=deaths,
            is_charged=bool(charged),
            is_dead=bool(dead),
            ran=ran.decode(errors="replace"),
        )
        for stage, prompt, deaths, charged, dead, ran in found
    ]
