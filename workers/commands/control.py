"""`penstock pause`, `resume` and `stop`: an operator's word to a run that goes on, wherever its roles are."""

import getpass
import os
import socket

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.run_control import ControlCommand, pause, resume, stop
from workers.run.run_info import find_run, with_run

_SENDERS = {"pause": pause, "resume": resume, "stop": stop}
_CONFIRMATIONS = {
    "pause": "is paused: what is in hand is finished, scored and trained; `penstock resume` lets it go on",
    "resume": "goes on",
    "stop": "was asked to stop: its workers finish or give back what they hold, its trainer keeps a checkpoint",
}


def send_command(command: ControlCommand, target: str | None, redis: str) -> None:
    """Say a word to a run, and print what comes of it.

    Raises:
        PenstockError: no such run, it does not go on, or there is nothing to do.
    """
    place = find_run(target, redis)
    if not place.url:
        raise PenstockError(
            f"run {place.run!r} does not go on, so there is nothing to {command}; `penstock run "
            f"{place.folder}/run.toml` starts it"
        )
    who = operator_name()

    async def main(connection: RunConnection) -> bool:
        return await _SENDERS[command](connection, who)

    trained = with_run(place, main)
    nobody = "" if trained else " (no trainer holds it at the moment)"
    print(f"run {place.run!r} {_CONFIRMATIONS[command]}{nobody}", flush=True)  # noqa: T201  (this is the command's output)


def operator_name() -> str:
    """USER@HOST, as the others shall read it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
