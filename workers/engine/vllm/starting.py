"""How vLLM is started: its flags and its environment, as they were found to work (docs/vllm.md)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from workers.engine.vllm.interpreter import PLUGIN
from workers.settings import Settings

SERVER: Final = ("-m", "vllm.entrypoints.openai.api_server")
"""Not `vllm serve`, which asks for a distribution of that name, as the build for CPUs is not called."""
QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Models lie in folders; nobody is asked for them, nor told of them."""
WITHOUT_GPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request with log-probs takes 17 s to 34 s
}
FLAGS_WITHOUT_GPU: Final = (
    "--enforce-eager",
    # 0.32 ends with "CPU Generator does not use offset" when a request with a seed has its prompt read in parts.
    "--no-enable-chunked-prefill",
)
_NOT_ITS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
"""Of our own interpreter. The last would make each start take 30 s longer, all that it imports being compiled anew."""


def backend(settings: Settings) -> str:
    """By which the server takes new weights: our plugin's, or vLLM's own for transfers from GPU to GPU."""
    return "nccl" if settings.weights.transport == "nccl" else PLUGIN


def command(settings: Settings, python: Path, host: str, port: int, *, cpu: bool) -> list[str]:
    """The command line of a server for the run's policy.

    Args:
        settings: of the run.
        python: the interpreter that has vLLM.
        host: address to listen on.
        port: not 0.
        cpu: it is a build for machines without a GPU.
    """
    engine = settings.engine
    return [
        *(str(python), *SERVER, "--model", str(Path(settings.model.path).absolute())),
        *("--host", host, "--port", str(port)),
        *("--dtype", settings.model.dtype),
        *("--max-model-len", str(engine.max_length), "--max-num-seqs", str(engine.max_batch)),
        "--enable-scale-out",  # token ids in, token ids out
        *("--logprobs-mode", "processed_logprobs"),  # of what was sampled, at its temperature
        *("--generation-config", "vllm"),  # no sampling parameters but ours
        *("--weight-transfer-config", json.dumps({"backend": backend(settings)})),
        "--disable-uvicorn-access-log",
        *(FLAGS_WITHOUT_GPU if cpu else ()),
        *engine.flags,  # the last word is the user's
    ]


def environment(ours: Mapping[str, str], *, threads: int, cpu: bool) -> dict[str, str]:
    """The environment of a server; what is set in ours holds.

    Args:
        ours: this process's.
        threads: that compute, where there is no GPU.
        cpu: it is a build for machines without a GPU.
    """
    kept = {name: value for name, value in ours.items() if name not in _NOT_ITS}
    recipe = {**QUIET, **(WITHOUT_GPU if cpu else {}), **kept}
    if cpu:
        recipe["OMP_NUM_THREADS"] = str(threads)
    # The routes that bring new weights; and no folder named `vllm` in the working directory is imported.
    return recipe | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONSAFEPATH": "1"}
