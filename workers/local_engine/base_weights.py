"""The weights that LoRA adapters are added to: each adapter takes the place of the one before.

Sampling with merged weights costs nothing, and an adapter is a small part of the model to write, check and read. The
base is never rounded twice: it is kept apart, and each sum is computed from it.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stream.errors import EngineRefusedError

ADAPTER_FILE: Final = "adapter_model.safetensors"
NAME_PREFIX: Final = "base_model.model."
"""Prefix of tensor names in peft's files."""
BASE, SCALE = "base", "scale"
"""Entries of the file's metadata: `weights_digest` of the base, and the factor of the product of two matrices."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_DIGEST_ELEMENTS: Final = 64
"""Number of elements of each weight in a digest."""


def weights_digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of a model's weights: names, shapes, data types, and some elements of each."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in parameters:
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // _DIGEST_ELEMENTS)].float().cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Product:
    """What an adapter adds to one weight: `b @ a`, scaled."""

    a: Tensor
    b: Tensor

    @property
    def fits_together(self) -> bool:
        """Whether the two can be multiplied."""
        return self.a.ndim == self.b.ndim == 2 and self.b.shape[1] == self.a.shape[0] > 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]

    def largest(self) -> float:
        """Return an upper bound of all magnitudes; NaN or infinite if the matrices are."""
        return float(self.a.abs().max()) * float(self.b.abs().max()) * self.a.shape[0]


class BaseWeights:
    """The base weights of a model whose weights are replaced by their sums with adapters.

    Args:
        model: the model; its weights are the base until an adapter is added.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._digest = ""
        """Of the base; empty: the model's weights are the base."""
        self._kept: dict[str, Tensor] = {}
        """Copies of the base weights that an adapter has changed."""

    def forget(self) -> None:
        """Take the weights that the model has now for the base."""
        self._digest = ""
        self._kept = {}

    def add(self, folder: Path) -> None:
        """Make the model's weights the base plus the adapter in a folder, which has peft's format.

        Raises:
            EngineRefusedError: the adapter is unreadable, belongs to other base weights, or does not fit the model.
                The weights are unchanged.
        """
        file = folder / ADAPTER_FILE
        tensors, metadata = _read(file)
        digest = self._digest or weights_digest(self._model.named_parameters())
        if metadata.get(BASE) != digest:
            raise EngineRefusedError(
                f"{file}: the old weights stay; the adapter was trained on other weights than this engine began with, "
                "or with another model.dtype: serve the run's model.path, or set weights.transport to 'files'"
            )
        live = dict(self._model.named_parameters())
        products, scale = _pair(tensors), _scale(metadata)
        problems = [*_problems(products, live, scale), *_alone(tensors)]
        if problems:
            more = f" and {len(problems) - 1} more like it" if len(problems) > 1 else ""
            raise EngineRefusedError(f"{file}: the old weights stay; {problems[0]}{more}")
        self._digest = digest
        with torch.no_grad():
            for name in self._kept.keys() - products.keys():
                live[name].copy_(self._kept.pop(name))
            for name, product in products.items():
                if name not in self._kept:
                    self._kept[name] = _compact(live[name])
                delta = (product.b @ product.a) * scale
                base = self._kept[name].to(torch.promote_types(live[name].dtype, delta.dtype))
                live[name].copy_(base + delta)


def _compact(weight: Tensor) -> Tensor:
    """Return a copy, in bfloat16 if that loses nothing, as with most published models."""
    half = weight.to(torch.bfloat16)
    return half if torch.equal(half.to(weight.dtype), weight) else weight.clone()


def _read(file: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not iterable)
            return tensors, opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise EngineRefusedError(f"{file}: cannot be read as safetensors: {error}; the old weights stay") from error


def _pair(tensors: Mapping[str, Tensor]) -> dict[str, _Product]:
    """Return the products of an adapter by the names of the weights that they are added to."""
    return {
        name.removeprefix(NAME_PREFIX).removesuffix(_A) + ".weight": _Product(a, tensors[name.removesuffix(_A) + _B])
        for name, a in tensors.items()
        if name.endswith(_A) and name.removesuffix(_A) + _B in tensors
    }


def _scale(metadata: Mapping[str, str]) -> float:
    try:
        return float(metadata.get(SCALE, "nan"))
    except ValueError:
        return math.nan


def _alone(tensors: Mapping[str, Tensor]) -> Iterable[str]:
    for name in sorted(tensors):
        partner = name.removesuffix(_A) + _B if name.endswith(_A) else name.removesuffix(_B) + _A
        if partner not in tensors:
            yield f"{name} has no partner"


def _problems(products: Mapping[str, _Product], live: Mapping[str, Tensor], scale: float) -> Iterable[str]:
    if not products:
        yield "it has no pair of matrices"
    if not math.isfinite(scale):
        yield "its metadata has no finite scale: it was not written by a run"
    for name, product in products.items():
        weight = live.get(name)
        if weight is None or weight.ndim != 2:
            yield f"the model has no matrix {name}"
        elif not product.fits_together:
            yield f"{name}: matrices {tuple(product.b.shape)} and {tuple(product.a.shape)} have no product"
        elif product.shape != tuple(weight.shape):
            yield f"{name} {product.shape} instead of {tuple(weight.shape)}"
        elif not product.largest() * abs(scale) < torch.finfo(weight.dtype).max:
            yield f"{name} is not finite"
