"""Pause, resume and stop a run. The commands go through the server, which is all that a run's processes share.

*Pause*: no prompts are handed out or fed; groups in progress are finished and scored, and trained in full steps.
*Resume* ends the pause. *Stop*: every process that is connected now gives up its work as after a signal. The scripts
that each role calls regularly (claim, renew_leases, feed, renew_trainer) return the number of the last stop request,
and `RunConnection.observe_stop` sets `RunConnection.stopping`.
"""

from typing import Literal

from stream.connection.run_connection import RunConnection
from stream.errors import NoRunError, PenstockError
from stream.operator.run_status import Pause

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
