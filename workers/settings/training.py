"""Settings of the trainer: its optimizer, and how a large model fits."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from workers.settings.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)


class Train(Section, frozen=True):
    """`[train]`: the optimizer and what it maximises."""

    groups_per_step: PositiveInt = 16
    """Groups in one optimizer batch."""
    max_steps: NonNegativeInt = 0
    """Stop after that many optimizer batches; 0: when every prompt has met its end."""
    updates_per_batch: PositiveInt = 1
    """Passes over one batch."""
    publish_every: PositiveInt = 1
    """Steps between two policy versions."""
    learning_rate: NonNegativeFloat = 1e-6
    """Of AdamW, at its peak."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall to 0 at `max_steps`, which they need."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Of matrices; gains and biases do not decay."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """The gradient's norm is clipped to it."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens of one forward pass, padding included where rows are padded."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Rows of a micro-batch one behind another, without padding. `auto`: on a GPU in bfloat16, where the model reads
    packed rows as it reads them apart; `on` refuses a model that does not."""
    attention: Literal["auto", "eager", "sdpa", "varlen", "flash_attention_2", "flash_attention_3"] = "auto"
    """Of the trainer's models. `varlen`: the flash attention that comes with torch; `flash_attention_2` and `_3` need
    the package `flash-attn`. `auto`: one of the first two where rows are packed, else what transformers chooses."""
    gradient_checkpointing: bool = False
    """Keep only what enters each layer for the backward pass and compute the rest again: less memory, a third more
    time."""
    threads: PositiveInt = 1
    """Torch threads of the trainer; with several ranks, of each."""
    ranks: PositiveInt = 1
    """Processes that the trainer is made of, on one machine: each holds a part of model and optimizer, and works on a
    part of each batch. Under `torchrun` its own number holds."""
    checkpoint_every: PositiveInt = 20
    """Steps between two checkpoints."""
    keep_last: PositiveInt = 2
    """Checkpoints kept, besides the one with the best mean reward."""


class Lora(Section, frozen=True):
    """`[lora]`: train a small adapter beside the weights of the model, which stay as they are."""

    rank: NonNegativeInt = 0
    """Of the two matrices beside each layer; 0: no adapter, the whole model is trained."""
    alpha: PositiveFloat = 32.0
    """What they add to the layer's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers that get them, by how their names end (`q_proj`); `all-linear`: every linear one but the output layer."""
    publish: Literal["merged", "adapter"] = "merged"
    """What engines are given: whole weights with the adapter added, or the adapter alone, which vLLM started with
    `--enable-lora` takes."""


LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "::1")
"""Hosts by which a machine reaches itself alone."""


class Weights(Section, frozen=True):
    """`[weights]`: how new weights get to the engines. See `docs/weights.md`."""

    transport: Literal["files", "http", "nccl"] = "files"
    """`files`: as a path on a file system that trainer and engines share; `http`: downloaded from the trainer; `nccl`:
    from GPU to GPU, unverified."""
    kv: Literal["recompute", "keep"] = "recompute"
    """What becomes of the keys and values of requests under way: computed again with the new weights, so that each
    token's log-prob is that of one version; or kept, which is faster, and is a mixture of versions."""
    host: str = "127.0.0.1"
    """By which engines reach the trainer, for `http` and `nccl`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Of the trainer's file server, for `http`; 0: a free one."""
    timeout_s: Seconds = 600.0
    """For one engine to take a version that it was told of."""
