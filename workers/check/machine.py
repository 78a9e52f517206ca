"""Checks the machine: installed packages, disk, memory, ports, Redis, and engines that run already."""

import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from stream.connection.run_connection import connect
from stream.errors import EngineError, PenstockError, ServerError, SettingsError
from stream.private_server import find_server
from workers.check.memory import check_memory
from workers.check.model import ModelFacts
from workers.check.report import Checker
from workers.engine_api.discovery import explain_lookup, find_engines
from workers.engine_api.http_connections import free_port
from workers.settings import Settings
from workers.settings.settings import RUNS
from workers.settings.training import DNS_PREFIX
from workers.vllm.launch_command import check_interpreter, resolve_interpreter

_DASHBOARD_HOST: Final = "127.0.0.1"
_CONNECT_TIMEOUT_S: Final = 2.0
_VLLM_TIMEOUT_S: Final = 20.0
_SAVED_BYTES: Final = 12
"""Bytes of each trained parameter in a checkpoint: float32 weights and Adam's two moments."""
_LEAST_FREE_BYTES: Final = 64 << 20
_GPU_FILES: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Files of the drivers of NVIDIA, of AMD, and of Windows for Linux."""


def check_machine(checker: Checker, facts: ModelFacts | None) -> None:
    """Report faults of installed packages, disk, memory, GPUs and ports. Blocks on files."""
    check_packages(checker)
    check_disk(checker, facts)
    check_memory(checker, facts)
    check_gpus(checker)
    check_ports(checker)


def check_packages(checker: Checker) -> None:
    """Report packages that this run's roles need and that are not installed."""
    settings = checker.settings
    needed = {"torch": "train", "transformers": "train", "safetensors": "train"}
    needed |= {"aiohttp": "rollout", "aiohappyeyeballs": "rollout", "httptools": "rollout"}
    if settings.lora.rank:
        needed["peft"] = "lora"
    needed |= {tracker: tracker for tracker in settings.train.trackers}
    for package, extra in needed.items():
        if find_spec(package) is None:
            remedy = f"pip install 'penstock[{extra}]' brings it"
            checker.about("packages", "this Python").error(f"{package} is not installed", remedy)


def check_disk(checker: Checker, facts: ModelFacts | None) -> None:
    """Compare free space with what checkpoints and published weights take."""
    settings = checker.settings
    disk = checker.about("disk", "run.folder")
    folder = _existing_parent(settings.folder if settings.run.name else RUNS)
    free = shutil.disk_usage(folder).free
    parameters = facts.parameters if facts and not settings.lora.rank else 0
    width = 2 if settings.model.dtype == "bfloat16" else 4
    one = parameters * (_SAVED_BYTES + width) + _LEAST_FREE_BYTES
    everything = one * (settings.train.max_checkpoints + 1) + 2 * parameters * width
    if free < one:
        message = f"{folder} has {_size(free)} free, and one checkpoint takes {_size(one)}"
        disk.error(message, "make room, or set run.folder to another disk")
    elif free < everything:
        disk.warn(
            f"{folder} has {_size(free)} free, and {settings.train.max_checkpoints} checkpoints and the best one take "
            f"about {_size(everything)}",
            "make room, lower train.max_checkpoints, or set run.folder to another disk",
        )
    if not _is_writable(folder):
        disk.error(f"{folder} cannot be written to", "set run.folder to a folder that can")


def check_gpus(checker: Checker) -> None:
    """Report that GPUs are named for engines, and this machine has none."""
    settings = checker.settings
    devices = list(settings.engine.devices)
    if devices and not any(file.exists() for file in _GPU_FILES):
        checker.about("engine", "engine.devices").error(
            f"{devices} are GPUs, and this machine has none, or no driver for it",
            "leave engine.devices out, or start the run where the GPUs are",
        )


def check_ports(checker: Checker) -> None:
    """Report addresses that this machine does not have, and ports that other processes have."""
    settings = checker.settings
    run = settings.run
    _check_port(run.host, run.port if settings.weights.transport == "http" else 0, "run.address", checker)
    if run.metrics_address:
        processes = (
            3 + settings.rollout.workers + settings.score.workers
        )  # supervisor, feeder and trainer are the three
        for port in range(run.metrics_port, run.metrics_port + processes) if run.metrics_port else (0,):
            _check_port(urlsplit(f"//{run.metrics_address}").hostname or "", port, "run.metrics_address", checker)
    if isinstance(run.dashboard, int):
        try:
            free_port(_DASHBOARD_HOST, run.dashboard)
        except EngineError as error:
            remedy = 'name another port, or "on", which takes a free one'
            checker.about("dashboard", "run.dashboard").warn(f"{error}, so the run has no dashboard", remedy)


def _check_port(host: str, port: int, setting: str, checker: Checker) -> None:
    """Report an address that cannot be listened on; port 0: any."""
    try:
        free_port(host, port)
    except EngineError as error:
        checker.about("port", setting).error(error, f"name another {'port, or none' if port else 'address'}")


async def check_redis(checker: Checker) -> None:
    """Report that there is no server to start, or that the server of `run.redis` does not answer or is not fit."""
    settings = checker.settings
    try:
        if url := settings.run.redis:
            with anyio.fail_after(4 * _CONNECT_TIMEOUT_S):
                async with connect(url, settings.run.name, reconnect_s=_CONNECT_TIMEOUT_S, create=False):
                    pass
        else:
            await anyio.to_thread.run_sync(find_server)
    except ServerError as error:
        checker.about("Redis", "run.redis").error(error)
    except TimeoutError:
        checker.about("Redis", "run.redis").error(f"{urlsplit(settings.run.redis).hostname} does not answer")
    checker.checked.append("Redis")


async def check_engines(checker: Checker) -> None:
    """Report engines that do not answer, and a vLLM that cannot be started."""
    settings = checker.settings
    engine = settings.engine
    async with anyio.create_task_group() as tasks:
        for entry in engine.urls:
            if entry.startswith(DNS_PREFIX):  # it may resolve on the workers' machines alone
                continue
            try:
                urls = await find_engines(entry)
            except (OSError, UnicodeError, SettingsError) as error:
                subject = checker.about("engine", "engine.urls")
                subject.warn(explain_lookup(error), "the run waits until it names engines")
                continue
            for url in urls:
                tasks.start_soon(_check_engine, url, checker)
    if engine.server == "vllm" and not engine.urls:
        await _check_vllm(partial(_inspect_vllm, settings), checker)


async def _check_engine(url: str, checker: Checker) -> None:
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with anyio.fail_after(_CONNECT_TIMEOUT_S):
            await (await anyio.connect_tcp(address.hostname or "", port)).aclose()
    except (OSError, TimeoutError) as error:
        why = str(error) or "no answer"
        waits = f"the run waits {checker.settings.engine_wait_s:g} s for it"
        checker.about("engine", "engine.urls").warn(f"{url} does not answer ({why})", waits)


def _inspect_vllm(settings: Settings) -> None:
    """Ask vLLM's interpreter what it has. Blocks.

    Raises:
        PenstockError: there is no vLLM, or one that cannot be used with these settings.
    """
    python, devices = resolve_interpreter(settings.engine.python), list(settings.engine.devices)
    if check_interpreter(python).is_cpu_build and devices:
        raise EngineError(
            f"engine.devices = {devices} are GPUs, and the vLLM of {python} was built for CPUs; leave engine.devices "
            "out, or name a vLLM for GPUs"
        )


async def _check_vllm(check: Callable[[], object], checker: Checker) -> None:
    try:
        with anyio.fail_after(_VLLM_TIMEOUT_S):
            await anyio.to_thread.run_sync(check, abandon_on_cancel=True)
    except PenstockError as error:
        checker.about("engine", "engine.python").error(error)
    except TimeoutError:
        checker.about("engine", "engine.python").warn(f"the interpreter did not answer within {_VLLM_TIMEOUT_S:g} s")


def _existing_parent(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _is_writable(folder: Path) -> bool:
    import os

    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _size(number: float) -> str:
    return f"{number / (1 << 30):,.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):,.0f} MiB"
