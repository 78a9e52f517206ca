"""Settings of the optimizer, of memory, of LoRA, of engines and of publishing weights to them."""

from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from workers.settings.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Section

Tracker = Literal["mlflow", "tensorboard", "trackio", "wandb"]


class TrainSettings(Section, frozen=True):
    """`[train]`: the optimizer."""

    batch_size: PositiveInt = 16
    """Groups (prompts with all their completions) in one optimizer batch."""
    max_steps: NonNegativeInt = 0
    """Optimizer batches of the whole run; 0: until all prompts are used."""
    updates_per_batch: PositiveInt = 1
    """Passes over one batch (PPO epochs)."""
    publish_every: PositiveInt = 1
    """Steps between two policy versions."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up; `linear` and `cosine` fall to 0 at `max_steps`, which they need."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; gains and biases have none."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Gradient clipping norm."""
    micro_batch_tokens: Literal["auto"] | PositiveInt = "auto"
    """Tokens of one forward pass, padding included; of rows that share their history, shared tokens count once. `auto`:
    what fits into the memory of the device, at most 16384; chosen when a run begins, and kept when it is resumed."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Concatenate the rows of a micro-batch without padding. `auto`: on a GPU in bfloat16, if a test at load time shows
    that the model reads packed rows correctly; `on`: refuse a model that does not."""
    attention: Literal["auto", "eager", "sdpa", "varlen", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel. `varlen`: torch's own flash attention; `flash_attention_2` and `_3` need the package
    `flash-attn`. `auto`: one of the flash kernels where rows are packed, else the default of transformers."""
    share_history: Literal["auto", "on", "off"] = "auto"
    """Forward a token that several rows begin with once instead of once for each row; gradients are the same. `auto`:
    if a test at load time shows that the model supports it, and enough tokens are shared; `on`: always, and refuse a
    model that does not."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    ranks: PositiveInt = 1
    """Trainer processes on this machine; each holds a shard of the model and the optimizer (FSDP2). Under `torchrun`
    its world size counts."""
    save_every: PositiveInt = 20
    """Steps between checkpoints."""
    max_checkpoints: PositiveInt = 2
    """Checkpoints to keep, besides the one with the best mean reward."""
    trackers: tuple[Tracker, ...] = ()
    """Trackers that get each step's metrics besides `metrics.jsonl`: `wandb`, `tensorboard`, `trackio`, `mlflow`. Each
    needs the extra of its name; project and credentials come from its own environment variables
    (docs/run-folder.md)."""


class LoraSettings(Section, frozen=True):
    """`[lora]`: train a LoRA adapter and leave the model's weights unchanged."""

    rank: NonNegativeInt = 0
    """Rank of the adapter's matrices; 0: train the whole model."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Layers with an adapter, by the end of their names (`q_proj`); `all-linear`: all linear layers except the output
    layer."""


LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "::1")
"""Host names that only the same machine reaches."""


class WeightsSettings(Section, frozen=True):
    """`[weights]`: how engines get new weights (docs/weights.md)."""

    transport: Literal["auto", "files", "http", "nccl", "adapter"] = "auto"
    """`files`: from a file system that trainer and engines share; `http`: download from the trainer (`run.address`);
    `nccl`: GPU to GPU, unverified; `adapter`: only the LoRA adapter, as files. `auto`: `adapter` to local engines that
    the run starts, if `lora.rank` is set; else `files`."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """KV cache of running requests after an update. `recompute`: each token's log-prob belongs to one version; `keep`:
    faster, and a mixture of versions."""


DNS_PREFIX: Final = "dns+"
"""Prefix of an entry of `engine.urls` that is a DNS name."""
FILE_PREFIX: Final = "file:"
"""Prefix of an entry of `engine.urls` that is a file of URLs."""


class EngineSettings(Section, frozen=True):
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
    max_cache_bytes: Literal["auto"] | PositiveInt = "auto"
    """Memory for keys and values in a local engine; `auto`: a sixteenth of main memory, at most 2 GB. Sequences that do
    not fit wait; those that have ended are forgotten, the least recently used first."""
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
