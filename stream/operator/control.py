"""Pause, resume and stop a run. The commands go through the server, which is all that a run's processes share.

*Pause*: no prompts are handed out or fed; groups in progress are finished and scored, and trained in full steps.
*Resume* ends the pause. *Stop*: every process that is connected now gives up its work as after a signal. The scripts
that each role calls regularly (claim, renew_leases, feed, renew_trainer) return the number of the last stop request,
and `RunConnection.observe_stop` sets `RunConnection.stopping`.

`release_worker` is for supervisors: it gives back the work of a worker whose process has ended. `read_last_error` reads
the newest error of a run's workers, which explains why the run makes no progress.
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
            current = Pause(rest[0].decode(errors="replace"), int(rest[1]) / 1000)
            raise PenstockError(f"run {connection.run!r} is {current} already; `penstock resume` ends the pause")
        case 0:
            raise PenstockError(f"run {connection.run!r} is not paused")
        case -1:
            raise PenstockError(
                f"run {connection.run!r} has finished ({rest[0].decode()}); there is nothing to {command}"
            )
        case _:
            raise NoRunError(f"the server has no run named {connection.run!r}")


class HeldEntry(Struct, frozen=True, kw_only=True):
    """An entry that a worker held when its process ended, unless it only waited to be worked on alone."""

    stage: str
    prompt_id: str
    deaths: int
    """How many workers in a row have died while they held it."""
    is_charged: bool
    """Whether the death counts as a failure of this entry, because the worker worked on nothing else."""
    is_dead: bool
    """Whether the entry became a dead letter, because its failure limit was reached."""
    ran: str = ""
    """What the worker ran if the death is charged, for example `environment calculator`."""


async def release_worker(connection: RunConnection, host: str, pid: int, infra_limit: int, how: str) -> list[HeldEntry]:
    """Give back all entries of a worker whose process has ended, and count its death for them.

    Other workers may claim them at once. Without this call, the same happens when the leases expire.

    Args:
        connection: to the run.
        host: the worker's host, as in its consumer name.
        pid: the worker's process id.
        infra_limit: failures after which an entry becomes a dead letter.
        how: how the process ended, then the cause as `ErrorCause.render` writes it, for dead letters.

    Returns:
        The entries for which the death counts.
    """
    held = await connection.run_script("release_worker", f"-{host}-{pid}-", infra_limit, how[:4000])
    return [
        HeldEntry(
            stage=stage.decode(),
            prompt_id=prompt.decode(errors="replace"),
            deaths=deaths,
            is_charged=bool(charged),
            is_dead=bool(dead),
            ran=ran.decode(errors="replace"),
        )
        for stage, prompt, deaths, charged, dead, ran in held
    ]


class LastError(Struct, frozen=True, kw_only=True):
    """The error with which a worker gave an entry back most recently."""

    stage: str
    text: str
    """First line of the error."""
    at: datetime
    cause: ErrorCause
    """The exception that caused it; without file and line if they are not known."""

    def __str__(self) -> str:
        return f"the last error in {self.stage} was at {self.at:%H:%M:%S} UTC: {self.text}"


async def read_last_error(connection: RunConnection) -> LastError | None:
    """Return the newest error of all stages; None if no entry was given back with an error."""
    last_errors = await connection.read_hash("last_errors")
    errors = []
    for stage, value in last_errors.items():
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
