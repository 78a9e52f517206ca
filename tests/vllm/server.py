"""Real vLLM on the CPU, in a separate process and virtual environment.

Versions are in `requirements/vllm.lock`, environment and flags as in a run (`workers/vllm/launch_command.py`).
`PENSTOCK_VLLM` names an existing virtual environment to use instead.
"""

import os
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.error import URLError

from workers.vllm.launch_command import CPU_FLAGS, SERVER_MODULE, build_environment
from workers.vllm.process import OutputTail

ROOT = Path(__file__).parents[2]
START_S = 500
"""A start takes 19 s to 51 s on a quiet machine, minutes on a busy one."""
FLAGS = ("--dtype", "float32", "--max-num-seqs", "64", *CPU_FLAGS)


@cache
def vllm_python() -> Path:
    """Return the interpreter of vLLM's virtual environment; creates it if it is missing, which takes minutes."""
    folder = Path(os.environ.get("PENSTOCK_VLLM") or ROOT / ".cache" / "vllm")
    if "PENSTOCK_VLLM" not in os.environ:
        subprocess.run(["sh", str(ROOT / "tests" / "vllm" / "setup.sh"), str(folder)], check=True, timeout=1500)
    return folder / "bin" / "python"


@contextmanager
def vllm_server(model: Path, log: Path, *flags: str, port: int = 0) -> Iterator[str]:
    """Serve a model; yields the URL once the server is healthy.

    Args:
        model: a folder in Hugging Face form.
        log: file for the server's output.
        flags: `--runner pooling`, `--max-model-len 256`, ...
        port: 0 for a free one; a fixed one to restart a server at the same address.
    """
    port = port or free_port()
    # Its processes keep two cores busy while they sample. With the same priority, in a session of their own, they were
    # seen to block the test process for up to 3 s on a crowded machine, long enough for requests to end.
    command = ["nice", "-n", "5", str(vllm_python()), *SERVER_MODULE, "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=build_environment(os.environ, threads=1, is_cpu_build=True),
            cwd=log.parent,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    # The watchdog kills the rest of the group when its pipe closes: here, or when the tests are killed.
    watchdog = subprocess.Popen(
        ["sh", "-c", 'read -r _; kill -s KILL -- "-$0" 2>/dev/null', str(process.pid)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        watchdog.wait()
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"vLLM ended with {process.returncode}: {_said(log)}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"vLLM is not healthy after {START_S} s: {_said(log)}")


def _said(log: Path) -> str:
    """Return the server's error and the last lines of its log."""
    lines, words = log.read_bytes().splitlines(), OutputTail()
    for line in lines:
        words.add(line)
    return "\n".join([words.last_error, "its last lines:", *(line.decode(errors="replace") for line in lines[-40:])])


def free_port() -> int:
    """Return a port that stays free while vLLM starts: the system assigns none of these automatically."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
