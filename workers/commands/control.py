"""`penstock pause`, `resume` and `stop`: control a run through its Redis server, from any machine."""

import getpass
import os
import socket

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.control import ControlCommand, pause, resume, stop
from workers.runs.find import refuse_other_run
from workers.runs.run import Run
from workers.terminal.output import print_line

_SENDERS = {"pause": pause, "resume": resume, "stop": stop}
_CONFIRMATIONS = {
    "pause": "is paused: groups in progress are finished, scored and trained; `penstock resume` continues the run",
    "resume": "continues",
    "stop": "is stopping: workers finish or release what they hold, and the trainer saves a checkpoint",
}


def send_command(command: ControlCommand, run: Run) -> None:
    """Send a command to a run and print the result.

    Raises:
        PenstockError: the run is not running, or the command would have no effect.
    """
    if not run.url:
        raise PenstockError(
            f"run {run.name!r} is not running, so there is nothing to {command}; `penstock run "
            f"{run.folder}/run.toml` starts it"
        )
    operator = operator_name()

    async def send(connection: RunConnection) -> bool:
        await refuse_other_run(run, connection)
        return await _SENDERS[command](connection, operator)

    has_trainer = run.call(send)
    note = "" if has_trainer else " (no trainer is connected at the moment)"
    print_line(f"run {run.name!r} {_CONFIRMATIONS[command]}{note}")


def operator_name() -> str:
    """Return USER@HOST, which is shown to other operators beside a command."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user id without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
