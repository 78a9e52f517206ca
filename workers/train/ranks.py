"""The processes that share a step: each works on some of the micro-batches, all end with the same sums."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The default process group of `torch.distributed`, or this process alone where there is none.

    Every rank holds the whole batch and decides alike, so all of them come to the same collectives in the same order,
    even where there is nothing for one of them to do.
    """

    def __init__(self) -> None:
        shared = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if shared else 0
        self.size = dist.get_world_size() if shared else 1

    def mine(self, parts: list[Tensor]) -> list[Tensor]:
        """The micro-batches that this rank works on."""
        return parts[self.rank :: self.size]

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients over all ranks; a parameter that no token of this rank reached counts 0."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def combine(self, sums: dict[str, float], maxima: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Sums added up and maxima taken over all ranks, whichever names each of them has."""
        if self.size == 1:
            return sums, maxima
        gathered: list[tuple[dict[str, float], dict[str, float]] | None] = [None] * self.size
        dist.all_gather_object(gathered, (sums, maxima))
        found = [pair for pair in gathered if pair is not None]
        return (
            {name: sum(s.get(name, 0.0) for s, _ in found) for name in sorted({n for s, _ in found for n in s})},
            {name: max(m[name] for _, m in found if name in m) for name in sorted({n for _, m in found for n in m})},
        )
