"""Third-party servers as test processes, each in a separate virtual environment."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
import venv
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cases.ports import free_port

HERE = Path(__file__).parent
OPENENV = "openenv-core==0.3.0"
OPENENV_OLD = "openenv-core==0.2.0"
"""The last version whose client has synchronous calls, as TRL's examples require."""
_CHECKOUTS = {
    "PENSTOCK_OPENENV": "git clone --branch v0.3.0 https://github.com/huggingface/OpenEnv",
    "PENSTOCK_TRL": "git clone --branch v1.9.0 https://github.com/huggingface/trl",
}


def checkout(variable: str) -> Path:
    """Return the checkout that an environment variable names: third-party code in no package. Skips without it."""
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set; it names what `{_CHECKOUTS[variable]}` makes")
    return Path(os.environ[variable]).resolve(strict=True)


def virtual_environment(name: str, *requirements: str) -> Path:
    """Return the interpreter of a virtual environment, made once and reused; its packages may conflict with ours."""
    home = Path(sys.prefix) / "adapters" / f"{name}-{zlib.crc32(' '.join(requirements).encode()):08x}"
    home.parent.mkdir(exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "ready").exists():
            shutil.rmtree(home, ignore_errors=True)
            venv.create(home, with_pip=True)
            install = [home / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements]
            done = subprocess.run(install, capture_output=True, text=True, timeout=900, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            (home / "ready").touch()
    return home / "bin" / "python"


@contextmanager
def serving(
    command: list[str | Path], port: int, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server's process; yield when its port answers, and kill it at the end."""
    with (folder / f"server-{port}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 60
            while not _answers(port):
                assert process.poll() is None, Path(log.name).read_text()[-3000:]
                assert time.monotonic() < deadline, Path(log.name).read_text()[-3000:]
                time.sleep(0.05)
            yield process
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@contextmanager
def openenv_server(app: str, folder: Path, *paths: Path) -> Iterator[str]:
    """Start an OpenEnv server as its README does; yield its address."""
    port = free_port()
    command = [
        virtual_environment("openenv", OPENENV),
        "-m",
        "uvicorn",
        app,
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    result = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "MAX_CONCURRENT_ENVS": "64"}
    with serving(command, port, folder, result):
        yield f"ws://127.0.0.1:{port}"


def openenv_init(folder: Path) -> Path:
    """Create the echo environment of `openenv init echo_env`. Return its folder, which is also a package."""
    command = [virtual_environment("openenv", OPENENV), "-m", "openenv.cli", "init", "echo_env"]
    offline = {**os.environ, "UV_OFFLINE": "1"}  # otherwise it resolves a lock file
    done = subprocess.run(command, cwd=folder, env=offline, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return folder / "echo_env"
