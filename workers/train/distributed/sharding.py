"""Tensors that ranks may hold in shards: gathering them, setting them, clipping their gradients."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from workers.train.distributed.ranks import Ranks


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
