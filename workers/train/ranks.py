"""Ranks: the processes that share a step. Each computes some of the micro-batches; all end with the same sums.

Tensors may be in shards over the ranks; here they are gathered and set, and their gradients clipped.
"""

import math
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from stream.errors import SettingsError

T = TypeVar("T")

TIMEOUT_VARIABLE: Final = "PENSTOCK_RANKS_TIMEOUT_S"
"""Environment variable, not a setting: followers need it before they receive the settings."""


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and number of ranks as set by `torchrun`; (0, 1) for a process that it did not start."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def collective_timeout_s() -> float:
    """Return how long a rank waits for another in a collective: 600 s, or `PENSTOCK_RANKS_TIMEOUT_S`.

    It bounds the wait for a rank that hangs. A rank that exits is noticed at once, by its connections.

    Raises:
        SettingsError: the variable is not a number from 1 to 86400.
    """
    value = os.environ.get(TIMEOUT_VARIABLE, "600")
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 1 <= timeout_s <= 86_400:
        raise SettingsError(
            f"{TIMEOUT_VARIABLE} is {value!r} in the environment; set it to seconds from 1 to 86400, or unset it"
        )
    return timeout_s


def init_process_group() -> None:
    """Join the other ranks that `torchrun` started, with gloo between CPUs and NCCL between GPUs.

    Raises:
        SettingsError: `PENSTOCK_RANKS_TIMEOUT_S` is invalid.
    """
    timeout = timedelta(seconds=collective_timeout_s())
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=timeout)


def destroy_process_group() -> None:
    """Leave the process group, if this process has joined it."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Ranks:
    """The default process group of `torch.distributed`, or this process alone if there is none.

    Every rank holds the full batch and computes the same decisions, so all ranks reach the same collectives in the same
    order, also when one of them has no micro-batch left.

    Args:
        device: of the models. By default a GPU if there is one; several ranks on one machine take one each.
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
        """The mesh over which models are sharded; None for a single process."""

    @property
    def is_rank0(self) -> bool:
        """Whether this is the rank that reads and writes files."""
        return self.rank == 0

    def local_batches(self, batches: list[T]) -> list[T | None]:
        """Return the micro-batches of this rank, padded with None to the same number on every rank.

        A pass through a sharded model is a collective, so every rank makes the same number of passes.
        """
        own: list[T | None] = [*batches[self.rank :: self.world_size]]
        turns = -(-len(batches) // self.world_size)
        return own + [None] * (turns - len(own))

    def all_reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of parameters that are not sharded; the backward pass has summed those of shards.

        A missing gradient counts as 0: no token of this rank used the parameter.
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
        """Return the sum over all ranks; `tensor` is overwritten with it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_metrics(
        self, sums: dict[str, float], maxima: dict[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return sums added up and maxima taken over all ranks; a rank may lack some of the names."""
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
        """Return rank 0's message on every rank; the argument of other ranks is ignored."""
        if self.world_size == 1:
            return message
        messages = [message]
        dist.broadcast_object_list(messages, src=0, device=torch.device("cpu"))
        return messages[0]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1))


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the full tensor of a parameter that may be sharded; each rank adds its own share to the gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.full_tensor(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that every rank holds in full the way `like` is sharded; return it unchanged if `like` is full."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def broadcast_into(target: Tensor, source: Tensor | None, ranks: Ranks) -> None:
    """Set a tensor, sharded or full, to rank 0's values on every rank.

    Args:
        target: on every rank.
        source: of the same shape, on rank 0; None elsewhere.
        ranks: all of them call this.
    """
    with torch.no_grad():
        if isinstance(target, DTensor):
            given = torch.empty(target.shape, dtype=target.dtype) if source is None else source.detach()
            given = given.to(ranks.device, target.dtype)
            target.to_local().copy_(distribute_tensor(given, target.device_mesh, target.placements).to_local())
            return
        if source is not None:
            target.copy_(source)
        if ranks.world_size > 1:
            dist.broadcast(target.detach(), 0)


def gather_full(
    tensors: Mapping[str, Tensor], ranks: Ranks, dtype: torch.dtype | None = None, *, copy: bool = False
) -> dict[str, Tensor]:
    """Gather full tensors on rank 0's CPU; return an empty mapping on other ranks.

    Tensors are gathered one at a time, so a device holds at most one full tensor beside its shards. A tensor with two
    names stays one tensor.

    Args:
        tensors: by name; the same names in the same order on every rank.
        ranks: all of them call this.
        dtype: of floating-point results; unchanged by default.
        copy: no result shares memory with a tensor of `tensors`.
    """
    memo: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in memo:
            detached = tensor.detach()
            whole = detached.full_tensor() if isinstance(detached, DTensor) else detached
            to = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            result = whole.to(to).cpu() if ranks.is_rank0 else whole.new_empty(0)
            memo[id(tensor)] = result.clone() if copy and result is whole else result
    return {name: memo[id(tensor)] for name, tensor in tensors.items()} if ranks.is_rank0 else {}


def clip_grad_norm(parameters: Iterable[nn.Parameter], bound: float) -> Tensor:
    """Scale gradients so that their norm over all shards is at most `bound`; return the original norm on every rank."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
