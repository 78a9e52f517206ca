"""Settings of the trainer: its optimizer, and how a large model fits."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from workers.settings.section import Count, Fraction, Least0, Positive, Seconds, Section


class Train(Section, frozen=True):
    """`[train]`: the optimizer and what it maximises."""

    groups_per_step: Positive = 16
    """Groups in one optimizer batch."""
    max_steps: Count = 0
    """Stop after that many optimizer batches; 0: when every prompt has met its end."""
    updates_per_batch: Positive = 1
    """Passes over one batch."""
    publish_every: Positive = 1
    """Steps between two policy versions."""
    learning_rate: Least0 = 1e-6
    """Of AdamW, at its peak."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; linear and cosine fall to 0 at `max_steps`, which they need."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: Least0 = 0.0
    """Of matrices; gains and biases do not decay."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """The gradient's norm is clipped to it."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens of one forward pass."""
    threads: Positive = 1
    """Torch threads of the trainer."""
    checkpoint_every: Positive = 20
    """Steps between two checkpoints."""
    keep_last: Positive = 2
    """Checkpoints kept, besides the one with the best mean reward."""


LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
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
