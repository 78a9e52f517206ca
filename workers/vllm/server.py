"""A process that runs vLLM: it announces the server when that is healthy, and ends with it.

::

    penstock run ── penstock serve ─┬─ vLLM's server ── its engine core, its workers     a process group of their own
                    (this process)  └─ warden: kills that group when this process is gone, however it went

vLLM's output goes to our stderr.
"""

import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
import anyio
import structlog
from anyio.abc import Process

from stream.errors import EngineError, SettingsError
from workers.runtime.http_server import server_url
from workers.settings import Settings
from workers.vllm.interpreter import PLUGIN_NAME, check_interpreter, resolve_interpreter
from workers.vllm.launch_command import build_command, build_environment, weight_transfer_backend
from workers.vllm.output_tail import OutputTail

log = structlog.get_logger()

_STOP_TIMEOUT_S = 8.0
"""For vLLM to end when asked to; it frees what it shares between its processes."""
_ON_THE_WAY_S = 0.2
"""For what it has said before it ended."""
_HEALTH_EVERY_S = 0.25
_HEALTH_S = 5.0
_TELL_EVERY_S = 15.0
_LISTENS_EVERY_S = 2.0
_REFUSALS = 5
"""Refused connections in a row, after which a server that had listened does not end by itself either."""
_LONGEST_LINE = 64 * 1024
_BAD_USAGE = 2
"""Exit code of a command line that vLLM does not understand."""


async def serve_vllm(settings: Settings, *, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve a run's policy with vLLM until cancelled.

    Args:
        settings: settings of the run.
        host: address to listen on. Everyone who can reach it can change the weights.
        port: 0: a free one.
        ready: called with the URL once the server is healthy.

    Raises:
        SettingsError: there is no vLLM, or it does not know the flags.
        EngineError: there is no model, the port is taken, or vLLM ended or was not healthy in time; quotes its last
            error.
    """
    engine = settings.engine
    python = await anyio.to_thread.run_sync(resolve_interpreter, engine.python)
    installed = await anyio.to_thread.run_sync(
        check_interpreter, python, weight_transfer_backend(settings) == PLUGIN_NAME
    )
    if not await (anyio.Path(settings.model.path) / "config.json").is_file():  # vLLM would look for it elsewhere
        raise EngineError(
            f"{settings.model.path}: no config.json there; model.path must be a folder in Hugging Face form"
        )
    port = _free_port(host, port)
    tail = OutputTail()
    started = build_command(settings, python, host, port, is_cpu_build=installed.is_cpu_build)
    log.info("engine.started", vllm=installed.version, cpu=installed.is_cpu_build, command=" ".join(started))
    if not _is_loopback(host):
        log.warning("engine.exposed", host=host, why="everyone who can reach it can change its weights")
    env = build_environment(os.environ, threads=settings.run.threads, is_cpu_build=installed.is_cpu_build)
    async with _start_process(started, env, tail) as (process, warden), anyio.create_task_group() as tasks:
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
        tasks.start_soon(_watch_warden, warden)
        code = await process.wait()
        with anyio.move_on_after(_ON_THE_WAY_S):
            await silent.wait()
        said = tail.last_error  # what its other processes say from here on follows from its end
        tasks.cancel_scope.cancel()
    if gone.is_set():
        raise EngineError(f"vLLM did not listen any more, nor end; it was killed: {said}")
    raise _exit_error(code, said)


def _exit_error(code: int, last_error: str) -> EngineError | SettingsError:
    if code == _BAD_USAGE:
        return SettingsError(f"vLLM does not understand how it was started: {last_error}; see engine.flags")
    if code < 0:
        name = signal.Signals(-code).name
        return EngineError(f"vLLM was killed by {name}: by another process, or because memory ran out")
    return EngineError(f"vLLM exited with code {code}: {last_error}")


@asynccontextmanager
async def _start_process(
    command: list[str], env: dict[str, str], tail: OutputTail
) -> AsyncIterator[tuple[Process, Process]]:
    """VLLM's server, in a process group that is gone when the context is left, or this process is; and its warden."""
    process = await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
        start_new_session=True,
    )  # fmt: skip
    warden: Process | None = None
    try:
        # It reads from a pipe that we alone hold open, and kills when that closes: a SIGKILL to us closes it, too.
        warden = await anyio.open_process(
            ("sh", "-c", 'read -r _; kill -s KILL -- "-$0" 2>/dev/null', str(process.pid)),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        yield process, warden
    finally:
        with anyio.CancelScope(shield=True):
            _signal_group(process, signal.SIGTERM)
            with anyio.move_on_after(_STOP_TIMEOUT_S):
                await _copy_output(process, tail)
            _signal_group(process, signal.SIGKILL)
            await process.aclose()
            if warden is not None:
                await warden.aclose()


async def _watch_warden(warden: Process) -> None:
    """Wait until the warden is gone, which it never is while it is needed.

    Raises:
        EngineError: it is gone.
    """
    code = await warden.wait()
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"over with code {code}"
    raise EngineError(f"the warden of vLLM was {how}, without which vLLM could outlive this process; start it again")


def _signal_group(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody is left in it (macOS says it the second way)
        os.killpg(process.pid, number)


async def _copy_output(process: Process, tail: OutputTail) -> None:
    """Pass on what vLLM says, until all its processes have ended."""
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
    """Wait until the server answers.

    Raises:
        EngineError: it did not in time.
    """
    began, told = anyio.current_time(), 0.0
    timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            seconds = anyio.current_time() - began
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # it loads
            if seconds > timeout_s:
                raise EngineError(
                    f"vLLM was not healthy within {timeout_s:g} s (engine.start_timeout_s); it said last: "
                    f"{tail.last_error}"
                )
            if seconds - told > _TELL_EVERY_S:
                told = seconds
                log.info("engine.loading", seconds=round(seconds), said=tail.last_line)
            await anyio.sleep(_HEALTH_EVERY_S)


async def _wait_unreachable(url: str) -> None:
    """Wait until nobody has listened for a while, though the process is there.

    So 0.32.0 may end when its core is killed: it closes its port, and waits for ever for requests that nobody will
    answer. An answer that does not come is something else: it computes.
    """
    refused = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_S)) as session:
        while refused < _REFUSALS:
            await anyio.sleep(_LISTENS_EVERY_S)
            try:
                async with session.get(f"{url}/health", headers={"Connection": "close"}):
                    refused = 0
            except aiohttp.ClientConnectorError:
                refused += 1
            except (aiohttp.ClientError, TimeoutError, OSError):
                refused = 0


def _free_port(host: str, port: int) -> int:
    """Return the port if it is free now, or any free port for 0; vLLM binds it within its first seconds.

    Another server that listens there already could be mistaken for vLLM.

    Raises:
        EngineError: the address is none of this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server of ours that is gone is no hindrance
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise EngineError(f"cannot listen on {host}{f':{port}' if port else ''}: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
