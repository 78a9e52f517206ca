"""Settings of the engines: which there are, and how they are asked."""

from typing import Literal

from workers.settings.section import PositiveInt, Seconds, Section


class Engine(Section, frozen=True):
    """`[engine]`: who samples tokens."""

    urls: tuple[str, ...] = ()
    """Servers that speak vLLM's HTTP API. With neither these nor `dns`, `penstock run` starts engines of its own, each
    on a free port."""
    dns: str = ""
    """`http://NAME:PORT`, whose every address is an engine as well, asked for again every few seconds."""
    min_concurrency: PositiveInt = 8
    """Requests of a rollout worker that one engine gets at least, however busy it says it is."""
    max_concurrency: PositiveInt = 512
    """Requests of a rollout worker that one engine works on at once, at most; how many between the two, its own figures
    decide."""
    server: Literal["local", "vllm"] = "local"
    """Engines of our own: which server. `vllm` needs an interpreter that has it, with our plugin (docs/vllm.md)."""
    count: PositiveInt = 1
    """Engines of our own: how many."""
    devices: tuple[str, ...] = ()
    """Engines of our own: the GPUs of each, as CUDA_VISIBLE_DEVICES has them: `["1", "2,3"]`. Empty: all."""
    start_timeout_s: Seconds = 900.0
    """Engines of our own: time to load the model and to listen. Half a minute for vLLM, minutes for large models."""
    python: str = ""
    """vLLM: the interpreter that has it, or its virtual environment's folder. Empty: the one that runs Penstock."""
    flags: tuple[str, ...] = ()
    """vLLM: further flags, `["--gpu-memory-utilization", "0.6"]` for one; they win over ours."""
    request_timeout_s: Seconds = 300.0
    """For one turn."""
    attempts: PositiveInt = 3
    """Tries of one request before its completion is invalid."""
    max_batch: PositiveInt = 128
    """Engines of our own: sequences decoded together."""
    max_length: PositiveInt = 1024
    """Engines of our own: tokens of a sequence, prompt included."""
    threads: PositiveInt = 1
    """Engines of our own: threads that compute, where no GPU does."""
