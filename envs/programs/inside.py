"""The first program in the sandbox of an agent: passes connections on to the worker's endpoint, and starts the agent.

The sandbox has no network but its own loopback. What connects to the port there is passed on to a Unix socket, behind
which the worker listens::

    agent ── 127.0.0.1:8000 ── inside.py ── endpoint.sock ── worker

Standard input is a pipe from the worker: when it closes, the agent is asked to end, and killed after some seconds. All
that the agent has started ends with this program, since it is the first one of its process namespace.

It is a script of the standard library alone: `python -IS inside.py ORDER`, with an order in JSON.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

_MAX_CONNECTIONS = 64
"""Connections that are passed on at once; others wait to be accepted."""
_NOT_STARTED = 127


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy what one side sends to the other, until it ends."""
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one side has closed the connection
        for side in (source, target):
            side.close()


def pass_on(client: socket.socket, path: str, room: threading.Semaphore) -> None:
    """Pass one connection on."""
    try:
        with client, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.connect(path)
            sending = threading.Thread(target=pump, args=(client, server), daemon=True)
            sending.start()
            pump(server, client)
            sending.join()
    except OSError:  # the worker has ended the episode
        pass
    finally:
        room.release()


def serve(listener: socket.socket, path: str) -> None:
    """Pass all connections on."""
    room = threading.Semaphore(_MAX_CONNECTIONS)
    while True:
        room.acquire()
        client, _ = listener.accept()
        threading.Thread(target=pass_on, args=(client, path, room), daemon=True).start()


def end_with_worker(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Wait until standard input closes; then end the agent."""
    while os.read(0, 4096):
        pass
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(grace_s)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    os._exit(128 + signal.SIGKILL)  # what is left in the namespace is killed with this process


def main(order: dict[str, Any]) -> int:
    """Run the agent; returns its exit code, or 128 + the number of the signal that ended it."""
    for kind, limit in (
        (resource.RLIMIT_NPROC, order["processes"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit, limit) if most == resource.RLIM_INFINITY else (min(limit, most), most))
    if order["port"]:
        listener = socket.create_server(("127.0.0.1", order["port"]), backlog=128)
        threading.Thread(target=serve, args=(listener, order["socket"]), daemon=True).start()
    try:
        given = tempfile.TemporaryFile()  # noqa: SIM115  (it ends with this process)
        given.write(order["stdin"].encode())
        given.seek(0)
        process = subprocess.Popen(  # noqa: S603  (the command of the settings)
            order["command"],
            cwd=order["folder"],
            env=os.environ | {"PWD": order["folder"]},  # opencode works where it says, not where it is
            stdin=given,
            start_new_session=True,
        )
    except OSError as error:
        print(f"{order['command'][0]}: {error.strerror}", flush=True)  # noqa: T201
        return _NOT_STARTED
    threading.Thread(target=end_with_worker, args=(process, order["grace_s"]), daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(json.loads(sys.argv[1])))  # without waiting for connections
