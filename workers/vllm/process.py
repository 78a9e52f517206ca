"""Runs a vLLM server as a child process, reports its URL when it is healthy, and exits when it exits.

::

    penstock run ── penstock serve ─┬─ vLLM's server ── engine core, workers      one process group
                    (this process)  └─ watchdog: kills that group when this process exits, even after SIGKILL

vLLM's output is copied to this process's stderr. If vLLM fails, the original error is found in it, not the errors that
follow from it.
"""

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import aiohttp
import anyio
import structlog
from anyio.abc import Process

from stream.errors import EngineError, SettingsError
from workers.engine_api.http_access import is_loopback
from workers.engine_api.http_connections import free_port
from workers.engine_api.http_server import server_url
from workers.settings import Settings
from workers.vllm.launch_command import (
    PLUGIN_NAME,
    build_command,
    build_environment,
    check_interpreter,
    resolve_interpreter,
    weight_transfer_backend,
)

_PROCESS = re.compile(r"^\((?:\w+)(?: pid=\d+)?[^)]*\)\s*")
_LOGGED = re.compile(r"^(?:ERROR|CRITICAL|WARNING|INFO|DEBUG) \S+ \S+ \[[^\]]*\]\s*")
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit|Killed)\b.*:|(?:^|\s)error: ")
_CONSEQUENCES = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered an issue")
_REQUESTS = ("RequestValidationError",)
"""Errors in one client's request, which say nothing about the server."""
_DETAILS = 2
_KEPT = 400
_LONGEST = 2000


class OutputTail:
    """The last lines of a process's output."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)

    def add(self, line: bytes) -> None:
        """Append a line, without vLLM's prefixes of process and logger."""
        text = _PROCESS.sub("", line.decode(errors="replace").strip())
        text = _LOGGED.sub("", text).strip()
        if text:
            self._lines.append(text[:_LONGEST])

    @property
    def last_error(self) -> str:
        """The last error that is not a consequence of another; else the last error, else the last line."""
        lines = [*self._lines]
        errors = [
            place
            for place, line in enumerate(lines)
            if _ERROR.search(line) and not any(word in line for word in _REQUESTS)
        ]
        causes = [place for place in errors if not any(word in lines[place] for word in _CONSEQUENCES)]
        if not errors:
            return lines[-1] if lines else "it said nothing"
        place = (causes or errors)[-1]
        more = _DETAILS if "validation error" in lines[place] else 0  # pydantic puts the details below
        return " ".join(lines[place : place + 1 + more])

    @property
    def last_line(self) -> str:
        """The last line."""
        return self._lines[-1] if self._lines else ""


log = structlog.get_logger()

_STOP_TIMEOUT_S = 8.0
"""Seconds for vLLM to exit after SIGTERM, in which it frees memory that its processes share."""
_LATE_OUTPUT_S = 0.2
"""Seconds to read output that vLLM wrote before it exited."""
_HEALTH_EVERY_S = 0.25
_HEALTH_S = 5.0
_LOG_EVERY_S = 15.0
_CHECK_EVERY_S = 2.0
_REFUSALS = 5
"""Consecutive refused connections after which a server that was healthy counts as hung and is killed."""
_LONGEST_LINE = 64 * 1024
_BAD_USAGE = 2
"""Exit code of vLLM for an invalid command line."""


async def serve_vllm(settings: Settings, *, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve a run's policy with vLLM until cancelled.

    Args:
        settings: settings of the run.
        host: address to listen on. Anyone who can reach it can change the weights.
        port: port to listen on; 0: any free one.
        ready: called with the URL once the server is healthy.

    Raises:
        SettingsError: vLLM or its plugin is not installed, or vLLM does not accept its flags.
        EngineError: there is no model, the port is taken, or vLLM exited or was not healthy in time; quotes its last
            error.
    """
    engine = settings.engine
    python = await anyio.to_thread.run_sync(resolve_interpreter, engine.python)
    installed = await anyio.to_thread.run_sync(
        check_interpreter, python, weight_transfer_backend(settings) == PLUGIN_NAME
    )
    if not await (anyio.Path(settings.model.folder) / "config.json").is_file():  # vLLM would try to download it
        raise EngineError(
            f"{settings.model.path}: no config.json there; model.path must be a folder in Hugging Face form"
        )
    port = free_port(host, port)  # another server on that port could be mistaken for vLLM
    tail = OutputTail()
    started = await anyio.to_thread.run_sync(
        partial(build_command, settings, python, host, port, is_cpu_build=installed.is_cpu_build)
    )
    log.info("engine.started", vllm=installed.version, cpu=installed.is_cpu_build, command=" ".join(started))
    if not is_loopback(host):
        log.warning("engine.exposed", host=host, why="everyone who can reach it can change its weights")
    env = build_environment(os.environ, threads=settings.run.threads, is_cpu_build=installed.is_cpu_build)
    async with _start_process(started, env, tail) as (process, watchdog), anyio.create_task_group() as tasks:
        url, gone, silent = server_url(host, port), anyio.Event(), anyio.Event()

        async def listen() -> None:
            await _copy_output(process, tail)
            silent.set()

        async def announce() -> None:
            await _wait_healthy(url, engine.start_timeout_s, tail)
            log.info("engine.listening", url=url, model=settings.model.path)
            ready(url)
            await _wait_unreachable(url)
            gone.set()
            _signal_group(process, signal.SIGKILL)

        tasks.start_soon(listen)
        tasks.start_soon(announce)
        tasks.start_soon(_watch_watchdog, watchdog)
        code = await process.wait()
        with anyio.move_on_after(_LATE_OUTPUT_S):
            await silent.wait()
        last_error = tail.last_error  # errors of its other processes after this are consequences
        tasks.cancel_scope.cancel()
    if gone.is_set():
        raise EngineError(f"vLLM stopped listening without exiting and was killed: {last_error}")
    raise _exit_error(code, last_error)


def _exit_error(code: int, last_error: str) -> EngineError | SettingsError:
    if code == _BAD_USAGE:
        return SettingsError(f"vLLM does not accept its command line: {last_error}; see engine.flags")
    if code < 0:
        name = signal.Signals(-code).name
        return EngineError(f"vLLM was killed by {name}: by another process, or because memory ran out")
    return EngineError(f"vLLM exited with code {code}: {last_error}")


@asynccontextmanager
async def _start_process(
    command: list[str], env: dict[str, str], tail: OutputTail
) -> AsyncIterator[tuple[Process, Process]]:
    """Start vLLM in its own process group, and its watchdog; the group dies with the context and with this process."""
    process = await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
        start_new_session=True,
    )  # fmt: skip
    watchdog: Process | None = None
    try:
        # Its stdin closes when this process exits, even after SIGKILL; then it kills vLLM's process group.
        watchdog = await anyio.open_process(
            ("sh", "-c", 'read -r _; kill -s KILL -- "-$0" 2>/dev/null', str(process.pid)),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        yield process, watchdog
    finally:
        with anyio.CancelScope(shield=True):
            _signal_group(process, signal.SIGTERM)
            with anyio.move_on_after(_STOP_TIMEOUT_S):
                await _copy_output(process, tail)
            _signal_group(process, signal.SIGKILL)
            await process.aclose()
            if watchdog is not None:
                await watchdog.aclose()


async def _watch_watchdog(watchdog: Process) -> None:
    """Wait until the watchdog exits, which it should not do while vLLM runs.

    Raises:
        EngineError: the watchdog exited; vLLM could outlive this process.
    """
    code = await watchdog.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    raise EngineError(f"the watchdog of vLLM {how}; without it, vLLM could outlive this process: start it again")


def _signal_group(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the group is empty (PermissionError: macOS)
        os.killpg(process.pid, number)


async def _copy_output(process: Process, tail: OutputTail) -> None:
    """Copy vLLM's output to stderr and to `tail` until all its processes have exited."""
    assert process.stdout is not None  # noqa: S101  (it is a pipe)
    rest = b""
    async for chunk in process.stdout:
        sys.stderr.buffer.write(chunk)
        sys.stderr.buffer.flush()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            tail.add(line)
        rest = rest[-_LONGEST_LINE:]
    tail.add(rest)


async def _wait_healthy(url: str, timeout_s: float, tail: OutputTail) -> None:
    """Wait until `/health` answers 200.

    Raises:
        EngineError: it did not within `timeout_s`; quotes vLLM's last error.
    """
    began, logged_at = anyio.current_time(), 0.0
    timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            seconds = anyio.current_time() - began
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # the model is loading
            if seconds > timeout_s:
                raise EngineError(
                    f"vLLM was not healthy within {timeout_s:g} s (engine.start_timeout_s); its last error: "
                    f"{tail.last_error}"
                )
            if seconds - logged_at > _LOG_EVERY_S:
                logged_at = seconds
                log.info("engine.loading", seconds=round(seconds), said=tail.last_line)
            await anyio.sleep(_HEALTH_EVERY_S)


async def _wait_unreachable(url: str) -> None:
    """Wait until the server refuses several connections in a row while its process still runs.

    vLLM 0.32.0 may hang like this after its engine core was killed: it closes its port and waits forever for requests
    that never finish. Timeouts do not count, because a busy server may be slow to answer.
    """
    refused = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_S)) as session:
        while refused < _REFUSALS:
            await anyio.sleep(_CHECK_EVERY_S)
            try:
                async with session.get(f"{url}/health", headers={"Connection": "close"}):
                    refused = 0
            except aiohttp.ClientConnectorError:
                refused += 1
            except (aiohttp.ClientError, TimeoutError, OSError):
                refused = 0
