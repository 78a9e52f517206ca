"""Settings of the inference engines."""

from typing import Final, Literal
from urllib.parse import urlsplit

from workers.settings.section import NonNegativeInt, PositiveInt, Seconds, Section

DNS_PREFIX: Final = "dns+"
"""Prefix of an entry of `engine.urls` that is a DNS name."""
FILE_PREFIX: Final = "file:"
"""Prefix of an entry of `engine.urls` that is a file of URLs."""


class Engine(Section, frozen=True):
    """`[engine]`: the servers that sample tokens."""

    urls: tuple[str, ...] = ()
    """Servers with vLLM's HTTP API. `dns+http://NAME:PORT` stands for every address behind a DNS name, `file:PATH` for
    the URLs in a file, one a line; both are read again every few seconds. Empty: `penstock run` starts engines, each on
    a free port."""
    server: Literal["local", "vllm"] = "local"
    """Server that `penstock run` starts. `vllm` needs an interpreter with vLLM and Penstock's plugin (docs/vllm.md)."""
    count: PositiveInt = 1
    """Number of engines to start."""
    devices: tuple[str, ...] = ()
    """GPUs of each started vLLM, as in CUDA_VISIBLE_DEVICES: `["1", "2,3"]`. Empty: all."""
    start_timeout_s: Seconds = 900.0
    """Time for a started engine to load its model and listen: half a minute for vLLM, minutes for large models."""
    python: str = ""
    """vLLM's interpreter, or its virtual environment; empty: the interpreter that runs Penstock."""
    flags: tuple[str, ...] = ()
    """Further vLLM flags, for example `["--gpu-memory-utilization", "0.6"]`; they override Penstock's."""
    request_timeout_s: Seconds = 300.0
    """Deadline of one turn."""
    max_batch_size: PositiveInt = 128
    """Sequences that a started engine decodes together."""
    max_model_len: NonNegativeInt = 0
    """Tokens of a sequence in a started engine, prompt included; 0: `rollout.max_tokens` and 1024 for the prompt."""

    @property
    def named_urls(self) -> tuple[str, ...]:
        """The URLs in the settings, those of DNS names included."""
        return tuple(url.removeprefix(DNS_PREFIX) for url in self.urls if not url.startswith(FILE_PREFIX))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names and addresses in the settings under which clients know the engines."""
        return tuple(urlsplit(url).hostname or "" for url in self.named_urls)
