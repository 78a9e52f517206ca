"""Finds out which tensors of a checkpoint a live model loads, without changing the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

LoadsTensor = Callable[[str, tuple[int, ...]], bool]
"""Returns whether the model loads a tensor of this name and shape, or raises on it."""

_ABSENT = object()


@contextmanager
def tensor_probe(model: torch.nn.Module) -> Iterator[LoadsTensor]:
    """Replace the loaders of all parameters with recorders while the context is open.

    Only the model's own `load_weights` knows how names in a checkpoint map to fused and sharded parameters.
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
        except Exception:  # noqa: BLE001  (raised by the model: it does not ignore this name)
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
