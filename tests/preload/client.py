"""Stands for a process that the fork server runs: passes on its streams and signals, and ends as it ended.

Installed as an executable `python3`, so that whoever starts `sys.executable ARGUMENTS...` starts this. Modules and
scripts are run by the fork server, and code (`-c`) for a test process of xdist, whose first argument is `WORKER`. What
else there is (other code, isolated mode) becomes an ordinary Python.
"""

import json
import os
import signal
import socket
import sys

ADDRESS = "PENSTOCK_TEST_FORK_SERVER"
"""Environment variable: the socket on which the fork server listens."""
WORKER = "--worker"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def can_be_forked(arguments: list[str], *, code: bool = False) -> bool:
    """Whether these arguments of Python name a module or a script, or `code`, and nothing that a fork cannot give."""
    rest = arguments[1:] if arguments[:1] == ["-P"] else arguments
    return bool(rest) and (rest[0] == "-m" or (code and rest[0] == "-c") or not rest[0].startswith("-"))


def main(arguments: list[str]) -> None:
    """Have the arguments run."""
    address = os.environ.get(ADDRESS)
    if is_worker := arguments[:1] == [WORKER]:
        arguments = arguments[arguments.index("-c") :]
    elif not address or not can_be_forked(arguments):
        os.execv(sys.executable, [sys.executable, *arguments])
    folder = os.getcwd()  # noqa: PTH109  (pathlib takes as long to import as all else here)
    about = {"arguments": arguments, "folder": folder, "environment": dict(os.environ), "is_worker": is_worker}
    request = json.dumps(about).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    socket.send_fds(connection, [len(request).to_bytes(4, "little")], [0, 1, 2])
    connection.sendall(request)
    for number in SIGNALS:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    status = b""
    while len(status) < 4 and (more := connection.recv(4 - len(status))):
        status += more
    end(int.from_bytes(status, "little") if len(status) == 4 else 256)  # else the fork server is gone


def end(status: int) -> None:
    """End as a process with this status of `waitpid` did."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
