"""Tensors that ranks may hold in shards (`torch.distributed.tensor`), met by code that does not care which they are."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, distribute_tensor


def full_tensor(parameter: Tensor) -> Tensor:
    """A parameter that ranks may hold in shards, gathered; each rank adds its own share to the gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.full_tensor(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has whole, in shards as another one is; itself where that is whole too."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
