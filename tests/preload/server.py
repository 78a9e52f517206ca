"""Forks Python processes that have imported everything already: for tests that start hundreds of them.

    python tests/preload/server.py FOLDER LISTENER PARENT

Importing torch and transformers takes seconds of a core, and a test of a whole run starts six processes that do. A
process forked from this one has them at once, and is otherwise what it would be: its own session, arguments, folder,
environment and streams. The client in whose place it runs gives it its signals; it is killed when the client is.

LISTENER is the descriptor of its socket. It ends with the process PARENT and removes FOLDER. Linux only.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import shutil
import signal
import socket
import struct
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.preload.forks import fork_roles
from tests.preload.program import run_to_end

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "anyio._backends._asyncio",
    "hypothesis",
    "importlib.resources.readers",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "peft",
    "tests.soak.audit",
    "tests.soak.engine",
    "tests.soak.evaluation",
    "tests.soak.role",
    "tests.soak.run",
    "tests.soak.witness",
    "torch.optim.adamw",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_tokenizers",
    "transformers.utils.hub",
    "uvloop",
    "valkey",
    "workers.cli",
)
"""Imported beside all modules of our own packages."""
_PR_SET_PDEATHSIG = 1


def import_everything() -> None:
    """Import what tests of whole runs need; what cannot be imported here is left to the tests themselves."""
    ours = (
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("stream", "envs", "workers")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.stem not in {"__main__", "__init__"}
    )
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a module that warns is left to the tests as well: there it is a failure
        for name in (*ours, *MODULES):
            with suppress(ImportError, Warning):
                importlib.import_module(name)
    gc.freeze()  # the processes to come share these pages, as long as no collection writes to them
    gc.enable()


class ForkServer:
    """Forks, waits for what it has forked, and passes signals on."""

    def __init__(self, folder: Path, listener: int) -> None:
        self._executable = str(folder / "python3")
        self._pids = folder / "pids"
        self._pids.mkdir()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(fileno=listener)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def serve(self, parent: int) -> None:
        """Serve until that process ends."""
        with suppress(ProcessLookupError):  # it has ended already
            self._selector.register(os.pidfd_open(parent), selectors.EVENT_READ, lambda: sys.exit(0))
        while len(self._selector.get_map()) > 1:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            head, descriptors, *_ = socket.recv_fds(connection, 4, 3)
            left, request = int.from_bytes(head, "little"), b""
            while left and (more := connection.recv(left)):
                request, left = request + more, left - len(more)
        except OSError:  # its client was killed meanwhile
            connection.close()
            return
        if left or len(descriptors) != 3:
            connection.close()
            return
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            become(json.loads(request), descriptors, self._executable)
        for descriptor in descriptors:
            os.close(descriptor)
        client, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        (self._pids / str(client)).write_text(str(child))
        Served(self._selector, connection, child)


class Served:
    """One process, and the client in whose place it runs."""

    def __init__(self, selector: selectors.BaseSelector, connection: socket.socket, child: int) -> None:
        self._selector, self._connection, self._child = selector, connection, child
        self._exit = os.pidfd_open(child)
        self._has_ended = False
        selector.register(self._exit, selectors.EVENT_READ, self._ended)
        selector.register(connection, selectors.EVENT_READ, self._heard)

    def _heard(self) -> None:
        if self._has_ended:  # both events came in one `select`
            return
        with suppress(ConnectionResetError):
            if numbers := self._connection.recv(64):
                for number in numbers:
                    os.kill(self._child, number)
                return
        self._selector.unregister(self._connection)  # the client is dead
        _kill_session(self._child)

    def _ended(self) -> None:
        _, status = os.waitpid(self._child, 0)
        self._has_ended = True
        with suppress(OSError):
            self._connection.sendall(status.to_bytes(4, "little"))
        with suppress(KeyError):
            self._selector.unregister(self._connection)
        self._selector.unregister(self._exit)
        os.close(self._exit)
        self._connection.close()
        _kill_session(self._child)


def _kill_session(leader: int) -> None:
    """Kill a process, and what it has started in its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def become(request: dict[str, Any], descriptors: list[int], executable: str) -> None:
    """In the child: become the process that was asked for, and end as it does."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    os.closerange(3, 4096)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    if not request["is_worker"]:
        sys.executable = executable
        if supervises(request["arguments"]):
            fork_roles()
    run_to_end(request["arguments"])


def supervises(arguments: list[str]) -> bool:
    """Whether it may start the roles of a run: a script, or one of two commands."""
    return "-m" not in arguments[:2] or not {"run", "demo"}.isdisjoint(arguments)


def main(folder: Path, listener: int, parent: int) -> None:
    """Import, then serve."""
    try:
        server = ForkServer(folder, listener)
        import_everything()
        server.serve(parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
