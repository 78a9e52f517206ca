"""Replace the weights of a running model: read and check all tensors, then copy them in place."""

from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stream.errors import EngineRefusedError

_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MAX_LISTED = 5
"""Largest number of names that an error message lists; the rest are only counted."""


class _Shards(msgspec.Struct):
    """Index file of a model with several weight files."""

    weight_map: dict[str, str]


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Copy the weights of a safetensors file or a model folder into a model's parameters.

    Tensors that share memory, such as a tied `lm_head`, may be stored once or under each name.

    Raises:
        EngineRefusedError: the files are unreadable, names are missing or unexpected, a shape or dtype differs, a
            number is not finite, or tied tensors differ. The model is unchanged.
    """
    live = dict(model.state_dict(keep_vars=True))
    found = _read(path)
    _check(live, found, path)
    with torch.no_grad():
        for name, tensor in found.items():
            live[name].copy_(tensor)


def _read(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    try:
        for file in weight_files(path):
            with safe_open(file, framework="pt", device="cpu") as tensors:
                found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  (not iterable)
    except (OSError, SafetensorError, ValueError) as error:
        raise EngineRefusedError(f"{path}: cannot be read as safetensors: {error}") from error
    return found


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder, or the file itself.

    Raises:
        ValueError: the folder's index cannot be read.
    """
    if path.is_dir() and (path / _INDEX).is_file():
        index = msgspec.json.decode((path / _INDEX).read_bytes(), type=_Shards)
        return [path / name for name in sorted(set(index.weight_map.values()))]
    return [path / "model.safetensors" if path.is_dir() else path]


def _check(live: dict[str, Tensor], found: dict[str, Tensor], path: Path) -> None:
    names_of_memory: dict[int, list[str]] = {}
    for name, tensor in live.items():
        names_of_memory.setdefault(tensor.data_ptr(), []).append(name)
    problems = []
    if missing := [names[0] for names in names_of_memory.values() if not any(name in found for name in names)]:
        problems.append(f"missing: {_join(missing)}")
    if unexpected := sorted(set(found) - set(live)):
        problems.append(f"unexpected: {_join(unexpected)}")
    known = {name: tensor for name, tensor in found.items() if name in live}
    if misshapen := [name for name, tensor in known.items() if tensor.shape != live[name].shape]:
        shapes = [f"{name} {tuple(found[name].shape)} instead of {tuple(live[name].shape)}" for name in misshapen]
        problems.append(f"of another shape: {_join(shapes)}")
    if strange := [name for name, tensor in known.items() if tensor.dtype not in (*_FLOATS, live[name].dtype)]:
        problems.append(f"of another type: {_join([f'{name} {found[name].dtype}' for name in strange])}")
    elif infinite := [name for name, tensor in known.items() if not bool(torch.isfinite(tensor).all())]:
        problems.append(f"not finite: {_join(infinite)}")
    if apart := [
        ", ".join(names) for names in names_of_memory.values() if _differ([known[n] for n in names if n in known])
    ]:
        problems.append(f"tied in the model, but different in the update: {_join(apart)}")
    if problems:
        raise EngineRefusedError(f"{path}: the old weights stay; {'; '.join(problems)}")


def _differ(tensors: list[Tensor]) -> bool:
    return any(not torch.equal(tensors[0], other) for other in tensors[1:])


def _join(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
