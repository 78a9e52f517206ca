"""How vLLM is started: its flags and its environment, as they were found to work (docs/vllm.md)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from workers.settings import Settings
from workers.vllm.interpreter import PLUGIN_NAME

SERVER_MODULE: Final = ("-m", "vllm.entrypoints.openai.api_server")
"""Not `vllm serve`, which needs a distribution with the name `vllm`; the CPU build has another name."""
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
    # 0.32 ends with "CPU Generator does not use offset" when a request with a seed has its prompt read in parts.
    "--no-enable-chunked-prefill",
)
_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM makes room for."""
_MAX_LORAS: Final = 4
"""Adapters that requests under way are sampled by; a request of one more waits."""
_REMOVED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
"""Of our own interpreter. The last would make each start take 30 s longer, all that it imports being compiled anew."""


def weight_transfer_backend(settings: Settings) -> str:
    """By which the server takes new weights: our plugin's, or vLLM's own for transfers from GPU to GPU.

    Empty: it is given adapters, and keeps its weights.
    """
    if settings.publishes_adapters:
        return ""
    return "nccl" if settings.weights.transport == "nccl" else PLUGIN_NAME


def build_command(settings: Settings, python: Path, host: str, port: int, *, is_cpu_build: bool) -> list[str]:
    """The command line of a server for the run's policy.

    Args:
        settings: of the run.
        python: the interpreter that has vLLM.
        host: address to listen on.
        port: not 0.
        is_cpu_build: it is a build for machines without a GPU.
    """
    engine = settings.engine
    return [
        *(str(python), *SERVER_MODULE, "--model", str(Path(settings.model.path).absolute())),
        *("--host", host, "--port", str(port)),
        *("--dtype", settings.model.dtype),
        *("--max-model-len", str(engine.max_model_len), "--max-num-seqs", str(engine.max_batch_size)),
        "--enable-scale-out",  # token ids in, token ids out
        *("--logprobs-mode", "processed_logprobs"),  # of what was sampled, at its temperature
        *("--generation-config", "vllm"),  # no sampling parameters but ours
        *_weight_update_flags(settings),
        "--disable-uvicorn-access-log",
        *(CPU_FLAGS if is_cpu_build else ()),
        *engine.flags,  # the last word is the user's
    ]


def _weight_update_flags(settings: Settings) -> tuple[str, ...]:
    """Flags without which it does not take what the trainer publishes."""
    if name := weight_transfer_backend(settings):
        return ("--weight-transfer-config", json.dumps({"backend": name}))
    rank = next((room for room in _LORA_RANKS if room >= settings.lora.rank), settings.lora.rank)
    return ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(_MAX_LORAS))


def build_environment(own_environment: Mapping[str, str], *, threads: int, is_cpu_build: bool) -> dict[str, str]:
    """The environment of a server; what is set in ours holds.

    Args:
        own_environment: this process's.
        threads: that compute, where there is no GPU.
        is_cpu_build: it is a build for machines without a GPU.
    """
    kept = {name: value for name, value in own_environment.items() if name not in _REMOVED_VARIABLES}
    recipe = {**OFFLINE_ENVIRONMENT, **(CPU_ENVIRONMENT if is_cpu_build else {}), **kept}
    if is_cpu_build:
        recipe["OMP_NUM_THREADS"] = str(threads)
    # The routes that bring new weights and adapters; and no folder named `vllm` in the working directory is imported.
    routes = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return recipe | routes | {"PYTHONSAFEPATH": "1"}
