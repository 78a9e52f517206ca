"""An operator's word to a live run, wherever its roles are: they share nothing but the server, and hear it there.

*Pause*: no prompts are handed out and none are fed; what is in hand is finished and scored, and trained in full steps.
*Resume* undoes it. *Stop*: every process that is connected now lets go of its work, as a signal would make it: each
script that a role lives by (claim, renew, feed, stay) answers with the last request to stop, and sets `Link.stopping`.
"""

from typing import Literal

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.run_status import Pause

ControlCommand = Literal["pause", "resume", "stop"]


async def pause(connection: RunConnection, by: str) -> bool:
    """Pause the run. Returns whether a trainer holds it.

    Raises:
        PenstockError: it is paused already, it has finished, or there is no such run.
    """
    return await _send_command(connection, "pause", by)


async def resume(connection: RunConnection, by: str) -> bool:
    """Let a paused run go on. Returns whether a trainer holds it.

    Raises:
        PenstockError: it is not paused, it has finished, or there is no such run.
    """
    return await _send_command(connection, "resume", by)


async def stop(connection: RunConnection, by: str) -> bool:
    """Ask every process of the run to stop. Returns whether a trainer holds it.

    Raises:
        PenstockError: it has finished, or there is no such run.
    """
    return await _send_command(connection, "stop", by)


async def _send_command(connection: RunConnection, command: ControlCommand, by: str) -> bool:
    status, *rest = await connection.run_script("set_control", command, by)
    match status:
        case 1:
            return bool(rest[0])
        case 0 if rest:
            since = Pause(rest[0].decode(errors="replace"), int(rest[1]) / 1000)
            raise PenstockError(f"run {connection.run!r} is {since} already; `penstock resume` lets it go on")
        case 0:
            raise PenstockError(f"run {connection.run!r} is not paused")
        case -1:
            raise PenstockError(
                f"run {connection.run!r} has finished ({rest[0].decode()}); there is nothing to {command}"
            )
        case _:
            raise PenstockError(f"the server knows no run called {connection.run!r}")
