"""Where tests, and the processes that they start, are forked from a process that has imported everything already."""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.preload.client import ADDRESS, WORKER

HERE = Path(__file__).parent
REAL = "PENSTOCK_TEST_REAL_PROCESSES"
"""Environment variable: set, every process is a real one, as users start it; so it is at night."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    """Have test processes forked: otherwise each one imports torch and all of our modules, for seconds of a core."""
    if is_used():
        executable = start_fork_server()
        for spec in specs:
            spec.python = f"{executable} {WORKER}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let it import while other tests run."""
    if session.config.option.collectonly:
        return
    if any("preloaded" in getattr(item, "fixturenames", ()) for item in session.items) and is_used():
        start_fork_server()


def is_used() -> bool:
    """Whether there can be a fork server, and is to be one."""
    return sys.platform == "linux" and not os.environ.get(REAL)


def start_fork_server() -> str:
    """The executable that stands for Python; starts the fork server, once for all processes of a test run."""
    if not (address := os.environ.get(ADDRESS)):
        folder = Path(tempfile.mkdtemp(prefix="penstock-fork-"))
        address = os.environ[ADDRESS] = str(folder / "socket")
        executable = folder / "python3"
        executable.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
        executable.chmod(0o755)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)  # here, so that clients need not wait for it, and see it close if the server fails
            listener.listen(128)
            os.set_inheritable(listener.fileno(), True)
            numbers = map(str, (listener.fileno(), os.getpid()))
            command = [sys.executable, str(HERE / "server.py"), str(folder), *numbers]
            threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            environment = {**os.environ, **threads, "HF_HUB_OFFLINE": "1"}
            no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            os.posix_spawn(command[0], command, environment, file_actions=[no_input], setsid=True)
    return str(Path(address).with_name("python3"))


@pytest.fixture(scope="module")
def preloaded() -> Iterator[None]:
    """Processes that this module's tests start as `sys.executable` have all modules at once."""
    with pytest.MonkeyPatch.context() as patch:
        if is_used():
            patch.setattr(sys, "executable", start_fork_server())
        yield


def pid_of(client: int) -> int:
    """The process that runs in the place of this one: another one, if it was forked from the fork server."""
    if not (address := os.environ.get(ADDRESS)):
        return client
    note = Path(address).with_name("pids") / str(client)
    return int(note.read_text()) if note.exists() else client
