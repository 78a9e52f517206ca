"""Pause, resume and stop a run. The commands go through the server, which is all that a run's processes share.

*Pause*: no prompts are handed out or fed; groups in progress are finished and scored, and trained in full steps.
*Resume* ends the pause. *Stop*: every process that is connected now gives up its work as after a signal. The scripts
that each role calls regularly (claim, renew_leases, feed, renew_trainer) return the number of the last stop request,
and `RunConnection.observe_stop` sets `RunConnection.stopping`.

Give back the work of a worker whose process has ended, and count its death for what it held.

The last errors of a run's workers: they explain why nothing moves.
"""

from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

from stream.causes import ErrorCause, parse_cause
from stream.connection.run_connection import RunConnection
from stream.errors import NoRunError, PenstockError
from stream.operator.status import Pause

ControlCommand = Literal["pause", "resume", "stop"]


async def pause(connection: RunConnection, by: str) -> bool:
    """Pause the run. Returns whether a trainer is running.

    Raises:
        PenstockError: the run is paused already, it has finished, or it does not exist.
    """
    return await _send_command(connection, "pause", by)


async def resume(connection: RunConnection, by: str) -> bool:
    """End the run's pause. Returns whether a trainer is running.

    Raises:
        PenstockError: the run is not paused, it has finished, or it does not exist.
    """
    return await _send_command(connection, "resume", by)


async def stop(connection: RunConnection, by: str) -> bool:
    """Ask every process of the run to stop. Returns whether a trainer is running.

    Raises:
        PenstockError: the run has finished, or it does not exist.
    """
    return await _send_command(connection, "stop", by)


async def _send_command(connection: RunConnection, command: ControlCommand, by: str) -> bool:
    status, *rest = await connection.run_script("set_control", command, by)
    match status:
        case 1:
            return bool(rest[0])
        case 0 if rest:
            pause_ = Pause(rest[0].decode(errors="replace"), int(rest[1]) / 1000)
            raise PenstockError(f"run {connection.run!r} is {pause_} already; `penstock resume` ends the pause")
        case 0:
            raise PenstockError(f"run {connection.run!r} is not paused")
        case -1:
            raise PenstockError(
                f"run {connection.run!r} has finished ({rest[0].decode()}); there is nothing to {command}"
            )
        case _:
            raise NoRunError(f"the server has no run named {connection.run!r}")


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


class LastError(Struct, frozen=True, kw_only=True):
    """The error by which a worker last gave an entry back."""

    stage: str
    text: str
    """First line of the error."""
    at: datetime
    cause: ErrorCause
    """The exception behind it; without a place if it is not known."""

    def __str__(self) -> str:
        return f"the last error in {self.stage} was at {self.at:%H:%M:%S} UTC: {self.text}"


async def read_last_error(connection: RunConnection) -> LastError | None:
    """Return the newest error of all stages; None if no entry was given back with an error."""
    found = await connection.read_hash("last_errors")
    errors = []
    for stage, value in found.items():
        at_ms, _, text = value.partition(" ")
        errors.append((int(at_ms), stage, text))
    if not errors:
        return None
    time_ms, stage, text = max(errors)
    first_line, _, _ = text.partition("\n")
    return LastError(
        stage=stage,
        text=first_line,
        at=datetime.fromtimestamp(time_ms / 1000, UTC),
        cause=parse_cause(text) or ErrorCause(exception=first_line, source=f"stage {stage}"),
    )
