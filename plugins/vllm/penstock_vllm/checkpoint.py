"""A checkpoint in safetensors files: names and shapes, from the headers alone; how an update may differ; tensors."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from penstock_vllm.errors import FailedError, RefusedError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor by its name."""

_MAX_LISTED = 5
"""Names that a message lists before it only counts."""


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, or the file itself.

    Raises:
        RefusedError: it is not there, or holds no such files.
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
    """Names and shapes of the tensors in these files.

    Raises:
        RefusedError: a file is no safetensors file, or shorter than its header says.
        FailedError: it cannot be read.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not iterable)
                    found[name] = tuple(tensors.get_slice(name).get_shape())
        except OSError as error:
            raise FailedError(f"{file} cannot be read: {error}") from error
        except SafetensorError as error:
            raise RefusedError(f"{file} is no whole safetensors file: {error}") from error
    return found


def check_update(update: Shapes, reference: Shapes, loads_tensor: Callable[[str, tuple[int, ...]], bool]) -> None:
    """Whether an update has what the checkpoint has that the server was started with.

    Args:
        update: what came.
        reference: what the server was started with.
        loads_tensor: whether the model loads a tensor of that name and shape. A name in only one of the two matters
            if it does: a tied `lm_head` may be there or not, and so may the weights of parts that are not served.

    Raises:
        RefusedError: says all that is wrong.
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
    """Some of the names, and how many more."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def iter_tensors(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, on the CPU, one after the other.

    Raises:
        OSError: a file is not any more what `read_shapes` has seen.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not iterable)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise OSError(f"{file} cannot be read any more: {error}") from error
