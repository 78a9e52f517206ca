"""Where tests have the processes that they start forked from one that has imported everything already."""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preload.client import ADDRESS
from workers.run.process_launcher import ProcessLauncher

HERE = Path(__file__).parent
REAL = "PENSTOCK_TEST_REAL_PROCESSES"
"""Environment variable: set, every process is a real one, as users start it; so it is at night."""


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
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"alone-{os.getpid()}"
    folder = Path(tempfile.gettempdir()) / f"penstock-fork-{run[:16]}"
    folder.mkdir(exist_ok=True)
    executable, address = folder / "python3", folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not executable.exists():
            executable.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
            executable.chmod(0o755)
            # It ends with the process that has started all of these: with xdist that is not ours.
            parent = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, str(HERE / "server.py"), str(address), str(executable), str(parent)]
            no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            os.posix_spawn(command[0], command, environment, file_actions=[no_input], setsid=True)
    os.environ[ADDRESS] = str(address)
    return str(executable)


@pytest.fixture(scope="module")
def preloaded() -> Iterator[None]:
    """Processes that this module's tests start as `sys.executable` have all modules at once."""
    with pytest.MonkeyPatch.context() as patch:
        if is_used():
            patch.setattr(sys, "executable", start_fork_server())
            # A supervisor in the test's own process must not start a second fork server, which would import all anew.
            patch.setattr(ProcessLauncher, "preload", lambda self, modules: None)
        yield


def pid_of(client: int) -> int:
    """The process that runs in the place of this one: another one, if it was forked from the fork server."""
    if not (address := os.environ.get(ADDRESS)):
        return client
    note = Path(address).with_name("pids") / str(client)
    return int(note.read_text()) if note.exists() else client
