"""Reads names, shapes and tensors of a safetensors checkpoint, and checks whether an update fits the model."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from penstock_vllm.errors import FailedError, RefusedError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""

_MAX_LISTED = 5
"""Maximum number of names that a message lists; it counts the others."""


def find_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder; for a file, the file itself.

    Raises:
        RefusedError: the folder does not exist, its index cannot be read, or a file is missing.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise RefusedError(
            f"{folder} is not there: it has to be a folder that this host can read (without a shared file system, "
            "weights go over http)"
        )
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise RefusedError(f"{folder / INDEX} cannot be read: {error!r}") from error
        files = [folder / name for name in names]
    else:
        files = [folder / SINGLE]
    if missing := [file.name for file in files if not file.is_file()]:
        raise RefusedError(f"{folder} has no {join_names(missing)}")
    return files


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors in these files; reads only their headers.

    Raises:
        RefusedError: a file is not a safetensors file, or is truncated.
        FailedError: a file cannot be read.
    """
    result: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not iterable)
                    result[name] = tuple(tensors.get_slice(name).get_shape())
        except OSError as error:
            raise FailedError(f"{file} cannot be read: {error}") from error
        except SafetensorError as error:
            raise RefusedError(f"{file} is no whole safetensors file: {error}") from error
    return result


def check_update(update: Shapes, reference: Shapes, loads_tensor: Callable[[str, tuple[int, ...]], bool]) -> None:
    """Check that an update has the same tensors as the checkpoint that the server started with.

    Args:
        update: shapes of the update.
        reference: shapes of the checkpoint that the server started with.
        loads_tensor: returns whether the model loads a tensor of this name and shape. A name in only one of the two
            checkpoints is an error only if it does: a tied `lm_head`, or weights that are not served, may be missing
            or extra.

    Raises:
        RefusedError: lists all missing, unexpected and misshapen tensors.
    """
    problems = []
    if missing := [name for name in reference if name not in update and loads_tensor(name, reference[name])]:
        problems.append(f"missing: {join_names(missing)}")
    if unexpected := [name for name in update if name not in reference and loads_tensor(name, update[name])]:
        problems.append(f"unexpected: {join_names(unexpected)}")
    if other := [name for name in update if name in reference and update[name] != reference[name]]:
        shapes = [f"{name} {update[name]} instead of {reference[name]}" for name in other]
        problems.append(f"of another shape: {join_names(shapes)}")
    if problems:
        raise RefusedError(f"not this model's weights; {'; '.join(problems)}")


def join_names(names: list[str]) -> str:
    """Return the first names, and the number of the others, as text."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def iter_tensors(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and CPU tensors, one at a time.

    Raises:
        OSError: a file changed since `read_shapes` and is no longer valid.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not iterable)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise OSError(f"{file} cannot be read any more: {error}") from error
