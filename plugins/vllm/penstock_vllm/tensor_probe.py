"""Asks a live model which tensors of a checkpoint it takes, without giving it any."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

LoadsTensor = Callable[[str, tuple[int, ...]], bool]
"""From a tensor's name and shape to whether the model would load it, or break on it."""

_ABSENT = object()


@contextmanager
def tensor_probe(model: torch.nn.Module) -> Iterator[LoadsTensor]:
    """While this is open the model's parameters take nothing, and note that they were asked to.

    Only `load_weights` of the model itself knows how names of checkpoints become names of parameters that are fused and
    sharded.
    """
    asked: list[bool] = []

    def note(*_: Any, **__: Any) -> bool:
        asked.append(True)
        return True

    original_loaders = [(parameter, getattr(parameter, "weight_loader", _ABSENT)) for parameter in model.parameters()]
    for parameter, _ in original_loaders:
        parameter.weight_loader = note  # type: ignore[attr-defined]

    def loads_tensor(name: str, shape: tuple[int, ...]) -> bool:
        asked.clear()
        try:
            model.load_weights([(name, torch.empty(shape, device="meta"))])  # type: ignore[operator]
        except Exception:  # noqa: BLE001  (the model's own; what breaks on a name does not pass over it)
            return True
        return bool(asked)

    try:
        yield loads_tensor
    finally:
        for parameter, loader in original_loaders:
            if loader is _ABSENT:
                del parameter.weight_loader  # type: ignore[attr-defined]
            else:
                parameter.weight_loader = loader  # type: ignore[attr-defined]
