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
import psutil

from stream.connection.run_connection import connect
from stream.errors import EngineError, PenstockError, ServerError
from stream.server_process import find_server
from workers.run.preflight.findings import PreflightReport
from workers.run.preflight.model_check import ModelFacts
from workers.runs.folder import RUNS
from workers.runtime.ports import free_port
from workers.settings import Settings
from workers.vllm.interpreter import check_interpreter, resolve_interpreter

_DASHBOARD_HOST: Final = "127.0.0.1"
_CONNECT_TIMEOUT_S: Final = 2.0
_VLLM_TIMEOUT_S: Final = 20.0
_TRAINED_BYTES: Final = 16
"""Bytes of each trained parameter in the trainer: float32 weights, gradients, and Adam's two moments."""
_SAVED_BYTES: Final = 12
"""Bytes of each trained parameter in a checkpoint: float32 weights and Adam's two moments."""
_LEAST_FREE_BYTES: Final = 64 << 20
_HAS_GPU: Final = Path("/dev/nvidiactl").exists()
_GPU_FILES: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Of the drivers of NVIDIA, of AMD, and of Windows for Linux."""


def check_machine(settings: Settings, facts: ModelFacts | None, report: PreflightReport) -> None:
    """Report faults of installed packages, disk, memory, GPUs and ports. Blocks on files."""
    check_packages(settings, report)
    check_disk(settings, facts, report)
    check_memory(settings, facts, report)
    check_gpus(settings, report)
    check_ports(settings, report)


def check_packages(settings: Settings, report: PreflightReport) -> None:
    """Report packages that this run's roles need and that are not installed."""
    needed = {"torch": "train", "transformers": "train", "safetensors": "train"}
    needed |= {"aiohttp": "rollout", "aiohappyeyeballs": "rollout", "httptools": "rollout"}
    if settings.lora.rank:
        needed["peft"] = "lora"
    needed |= {tracker: tracker for tracker in settings.train.trackers}
    for package, extra in needed.items():
        if find_spec(package) is None:
            report.error(
                "packages", "this Python", f"{package} is not installed: pip install 'penstock[{extra}]' brings it"
            )


def check_disk(settings: Settings, facts: ModelFacts | None, report: PreflightReport) -> None:
    """Compare free space with what checkpoints and published weights take."""
    folder = _existing_parent(settings.folder if settings.run.name else RUNS)
    free = shutil.disk_usage(folder).free
    parameters = facts.parameters if facts and not settings.lora.rank else 0
    width = 2 if settings.model.dtype == "bfloat16" else 4
    one = parameters * (_SAVED_BYTES + width) + _LEAST_FREE_BYTES
    everything = one * (settings.train.max_checkpoints + 1) + 2 * parameters * width
    if free < one:
        report.error(
            "disk", "run.folder", f"{folder} has {_size(free)} free, and one checkpoint takes {_size(one)}; make room, "
            "or set run.folder to another disk"
        )  # fmt: skip
    elif free < everything:
        report.warn(
            "disk",
            "run.folder",
            f"{folder} has {_size(free)} free, and {settings.train.max_checkpoints} checkpoints and the best one take "
            f"about {_size(everything)}; make room, lower train.max_checkpoints, or set run.folder to another disk",
        )
    if not _is_writable(folder):
        report.error("disk", "run.folder", f"{folder} cannot be written to; set run.folder to a folder that can")


def check_memory(settings: Settings, facts: ModelFacts | None, report: PreflightReport) -> None:
    """Compare memory with what the trainer and the local engines take, on a machine without a GPU."""
    if facts is None or not facts.parameters or _HAS_GPU:
        return
    trained = facts.parameters * (4 if settings.lora.rank else _TRAINED_BYTES)
    engines = settings.engine.count * facts.parameters * 4 if not settings.engine.urls else 0
    needed, memory = trained + engines, psutil.virtual_memory()
    text = (
        f"a model of {facts.parameters / 1e6:,.0f} million parameters takes about {_size(needed)} in trainer and "
        f"engines, and this machine has "
    )
    remedy = "; use a smaller model, [lora], or a larger machine"
    if trained > memory.total:
        report.error("memory", "model.path", f"{text}{_size(memory.total)}{remedy}")
    elif needed > memory.available:
        report.warn("memory", "model.path", f"{text}{_size(memory.available)} free{remedy}")


def check_gpus(settings: Settings, report: PreflightReport) -> None:
    """Report that GPUs are named for engines, and this machine has none."""
    devices = list(settings.engine.devices)
    if devices and not any(file.exists() for file in _GPU_FILES):
        report.error(
            "engine",
            "engine.devices",
            f"{devices} are GPUs, and this machine has none, or no driver for it; leave engine.devices out, or start "
            "the run where the GPUs are",
        )


def check_ports(settings: Settings, report: PreflightReport) -> None:
    """Report addresses that this machine does not have, and ports that other processes have."""
    run = settings.run
    _check_port(run.host, run.port if settings.weights.transport == "http" else 0, "run.address", report)
    if run.metrics_address:
        processes = (
            3 + settings.rollout.workers + settings.score.workers
        )  # supervisor, feeder and trainer are the three
        for port in range(run.metrics_port, run.metrics_port + processes) if run.metrics_port else (0,):
            _check_port(urlsplit(f"//{run.metrics_address}").hostname or "", port, "run.metrics_address", report)
    if isinstance(run.dashboard, int):
        try:
            free_port(_DASHBOARD_HOST, run.dashboard)
        except EngineError as error:
            remedy = 'name another port, or "on", which takes a free one'
            report.warn("dashboard", "run.dashboard", f"{error}, so the run has no dashboard; {remedy}")


def _check_port(host: str, port: int, setting: str, report: PreflightReport) -> None:
    """Report an address that cannot be listened on; port 0: any."""
    try:
        free_port(host, port)
    except EngineError as error:
        report.error("port", setting, f"{error}; name another {'port, or none' if port else 'address'}")


async def check_redis(settings: Settings, report: PreflightReport) -> None:
    """Report that there is no server to start, or that the server of `run.redis` does not answer or is not fit."""
    try:
        if url := settings.run.redis:
            with anyio.fail_after(4 * _CONNECT_TIMEOUT_S):
                async with connect(url, settings.run.name, reconnect_s=_CONNECT_TIMEOUT_S, create=False):
                    pass
        else:
            await anyio.to_thread.run_sync(find_server)
    except ServerError as error:
        report.error("Redis", "run.redis", error)
    except TimeoutError:
        report.error("Redis", "run.redis", f"{urlsplit(settings.run.redis).hostname} does not answer")
    report.checked.append("Redis")


async def check_engines(settings: Settings, report: PreflightReport) -> None:
    """Report engines that do not answer, and a vLLM that cannot be started."""
    engine = settings.engine
    async with anyio.create_task_group() as tasks:
        for url in engine.static_urls:
            tasks.start_soon(_check_engine, url, settings, report)
    if engine.server == "vllm" and not engine.urls:
        await _check_vllm(partial(_inspect_vllm, settings), report)


async def _check_engine(url: str, settings: Settings, report: PreflightReport) -> None:
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with anyio.fail_after(_CONNECT_TIMEOUT_S):
            await (await anyio.connect_tcp(address.hostname or "", port)).aclose()
    except (OSError, TimeoutError) as error:
        why = str(error) or "no answer"
        report.warn(
            "engine", "engine.urls", f"{url} does not answer ({why}); the run waits {settings.engine_wait_s:g} s for it"
        )


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


async def _check_vllm(check: Callable[[], object], report: PreflightReport) -> None:
    try:
        with anyio.fail_after(_VLLM_TIMEOUT_S):
            await anyio.to_thread.run_sync(check, abandon_on_cancel=True)
    except PenstockError as error:
        report.error("engine", "engine.python", error)
    except TimeoutError:
        report.warn("engine", "engine.python", f"the interpreter did not answer within {_VLLM_TIMEOUT_S:g} s")


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
