"""Stands for a process that the fork server runs: passes on its streams and signals, and ends as it ended.

Installed as an executable `python3`, so that whoever starts `sys.executable ARGUMENTS...` starts this. What the fork
server does not run (`-c`, isolated mode, several ranks) becomes an ordinary Python.
"""

import json
import os
import signal
import socket
import sys
import time

ADDRESS = "PENSTOCK_TEST_FORK_SERVER"
"""Environment variable: the socket on which the fork server listens."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def can_be_forked(arguments: list[str]) -> bool:
    """Whether these arguments of Python name a module or a script, and nothing that a fork cannot give."""
    rest = arguments[1:] if arguments[:1] == ["-P"] else arguments
    return bool(rest) and (rest[0] == "-m" or not rest[0].startswith("-")) and "RANK" not in os.environ


def main(arguments: list[str]) -> None:
    """Have the arguments run."""
    address = os.environ.get(ADDRESS)
    if not address or not can_be_forked(arguments):
        os.execv(sys.executable, [sys.executable, *arguments])
    connection = connected(address)
    folder = os.getcwd()  # noqa: PTH109  (pathlib takes as long to import as all else here)
    request = json.dumps({"arguments": arguments, "folder": folder, "environment": dict(os.environ)}).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "little")], [0, 1, 2])
    connection.sendall(request)
    for number in SIGNALS:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    status = b""
    while len(status) < 4 and (more := connection.recv(4 - len(status))):
        status += more
    end(int.from_bytes(status, "little") if len(status) == 4 else 256)  # else the fork server is gone


def connected(address: str) -> socket.socket:
    """A connection to the fork server, which may have been started just now."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            time.sleep(0.02)
        else:
            return connection


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
