"""The processes that share a step: each works on some of the micro-batches, all end with the same sums."""

import math
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from stream.errors import SettingsError

TIMEOUT_VARIABLE: Final = "PENSTOCK_RANKS_TIMEOUT_S"
"""Environment variable. It is no setting, for ranks that follow have to know it before they are told any."""


def rank_and_world_size() -> tuple[int, int]:
    """Rank and number of ranks, as `torchrun` told this process; (0, 1) where it did not start it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def collective_timeout_s() -> float:
    """How long one rank waits for another within a collective: ten minutes, unless the environment says otherwise.

    A process that ended is noticed at once, by its connection; this is for one that hangs.

    Raises:
        SettingsError: what it says is no length of time.
    """
    said = os.environ.get(TIMEOUT_VARIABLE, "600")
    try:
        found = float(said)
    except ValueError:
        found = math.nan
    if not 1 <= found <= 86_400:
        raise SettingsError(
            f"{TIMEOUT_VARIABLE} is {said!r} in the environment; give it seconds, from 1 to 86400, or unset it"
        )
    return found


def init_process_group() -> None:
    """Join the other ranks that `torchrun` started: gloo between CPUs, NCCL between GPUs.

    Raises:
        SettingsError: the environment says nonsense of how long to wait for them.
    """
    patience = timedelta(seconds=collective_timeout_s())
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=patience)


def destroy_process_group() -> None:
    """Leave them."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """The default process group of `torch.distributed`, or this process alone where there is none.

    Every rank holds the whole batch and decides alike, so all of them come to the same collectives in the same order,
    even where there is nothing for one of them to do.

    Args:
        device: of the models; the first GPU if there is one, of several ranks on a machine each its own.
    """

    def __init__(self, device: str | None = None) -> None:
        shared = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if shared else 0
        self.world_size = dist.get_world_size() if shared else 1
        gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self.world_size > 1 else "cuda"
        self.device = torch.device(device or (gpu if torch.cuda.is_available() else "cpu"))
        self.mesh: DeviceMesh | None = (
            init_device_mesh(self.device.type, (self.world_size,)) if self.world_size > 1 else None
        )
        """Over which models are sharded; None for a process alone."""

    @property
    def is_rank0(self) -> bool:
        """This is the rank that reads and writes files."""
        return self.rank == 0

    def local_batches(self, batches: list[Tensor]) -> list[Tensor | None]:
        """The micro-batches that this rank works on; None for a turn in which it has nothing, and others do.

        A pass through a sharded model is a collective, so every rank makes the same number of them.
        """
        own: list[Tensor | None] = [*batches[self.rank :: self.world_size]]
        turns = -(-len(batches) // self.world_size)
        return own + [None] * (turns - len(own))

    def all_reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients of what every rank holds whole; those of shards have been added up by the backward pass.

        A parameter that no token of this rank reached counts 0.
        """
        if self.world_size == 1:
            return
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_metrics(
        self, sums: dict[str, float], maxima: dict[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Sums added up and maxima taken over all ranks, whichever names each of them has."""
        if self.world_size == 1:
            return sums, maxima
        gathered: list[tuple[dict[str, float], dict[str, float]] | None] = [None] * self.world_size
        dist.all_gather_object(gathered, (sums, maxima))
        found = [pair for pair in gathered if pair is not None]
        return (
            {name: sum(s.get(name, 0.0) for s, _ in found) for name in sorted({n for s, _ in found for n in s})},
            {name: max(m[name] for _, m in found if name in m) for name in sorted({n for _, m in found for n in m})},
        )

    def broadcast_bytes(self, message: bytes = b"") -> bytes:
        """What the first rank says, at every rank; the others' argument counts for nothing."""
        if self.world_size == 1:
            return message
        length = torch.tensor(len(message))
        dist.broadcast(length, 0)
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8) if self.is_rank0 and message else None
        if content is None:
            content = torch.empty(int(length), dtype=torch.uint8)
        if len(content):
            dist.broadcast(content, 0)
        return message if self.is_rank0 else content.numpy().tobytes()

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1))
