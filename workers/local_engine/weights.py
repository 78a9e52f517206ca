"""Weights of the local engine: load a model from a folder, and replace the weights of a running one.

New weights come from a folder, or over HTTP into a temporary one. All tensors are read and checked before the first is
copied in place.

Every program that reaches the engine's port can name a path. So a path alone is not enough: it must lie where the run
writes, or come with the digest of each file, which only a program that knows the weights can send.
"""

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import aiohttp
import anyio.to_thread
import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from stream.errors import EngineError, EngineRefusedError, SettingsError
from workers.engine_api.http_access import AccessRules
from workers.engine_api.wire import NEEDS_DIGESTS, WeightFile
from workers.local_engine.base_weights import ADAPTER_FILE

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
    """Return the safetensors files of a folder, which holds a model or an adapter, or the file itself.

    Raises:
        ValueError: the folder's index cannot be read.
    """
    if path.is_dir() and (path / _INDEX).is_file():
        index = msgspec.json.decode((path / _INDEX).read_bytes(), type=_Shards)
        return [path / name for name in sorted(set(index.weight_map.values()))]
    if holds_adapter(path):
        return [path / ADAPTER_FILE]
    return [path / "model.safetensors" if path.is_dir() else path]


def holds_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter instead of a model."""
    return (path / ADAPTER_FILE).is_file()


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


_READ_TIMEOUT_S = 60.0
"""Longest time to connect, and longest time without new bytes, in seconds."""
_CHUNK = 1 << 20


@asynccontextmanager
async def download_weights(url: str, files: Sequence[WeightFile]) -> AsyncIterator[Path]:
    """Download files to a temporary folder that exists while the context is open.

    Args:
        url: URL of the folder with the files; ends with a slash.
        files: the files to download.

    Raises:
        EngineRefusedError: the request is malformed, or the server does not have a file.
        EngineError: a file arrived incomplete or changed.
    """
    if not url.startswith(("http://", "https://")) or not url.endswith("/") or not files:
        raise EngineRefusedError(
            f"{url!r} with {len(files)} files: an http(s) URL that ends with a slash, and files, are required"
        )
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_READ_TIMEOUT_S, sock_connect=_READ_TIMEOUT_S)
    folder = await anyio.to_thread.run_sync(lambda: TemporaryDirectory(prefix="penstock-weights-"))
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for file in files:
                if file.name in {"", ".", ".."} or Path(file.name).name != file.name:
                    raise EngineRefusedError(f"{file.name!r} is not a plain file name; the old weights stay")
                await _download(session, url + file.name, Path(folder.name) / file.name, file)
        yield Path(folder.name)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(folder.cleanup)


async def _download(session: aiohttp.ClientSession, url: str, to: Path, file: WeightFile) -> None:
    digest, received = hashlib.sha256(), 0
    try:
        async with session.get(url, allow_redirects=False) as answer, await anyio.open_file(to, "wb") as written:
            if answer.status != 200:
                kind = EngineRefusedError if 300 <= answer.status < 500 else EngineError
                raise kind(f"{file.name}: the server answers {answer.status}; the old weights stay")
            async for chunk in answer.content.iter_chunked(_CHUNK):
                received += len(chunk)
                if received > file.size:
                    break
                await written.write(chunk)
                await anyio.to_thread.run_sync(digest.update, chunk)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = str(error) or type(error).__name__
        raise EngineError(f"{file.name} was not downloaded: {why}; the old weights stay") from error
    if received != file.size:
        more = " and more" if received > file.size else ""
        raise EngineError(f"{file.name} has {received} bytes{more} instead of {file.size}; the old weights stay")
    if digest.hexdigest() != file.sha256:
        raise EngineError(f"{file.name} has sha256 {digest.hexdigest()} instead of {file.sha256}; the old weights stay")


MODEL_CLASSES: Final = {
    "causal model": AutoModelForCausalLM,
    "sequence classifier": AutoModelForSequenceClassification,
}


def load_model(folder: Path, kind: str, dtype: torch.dtype, **options: Any) -> Any:
    """Load a model onto the CPU, in evaluation mode.

    Args:
        folder: folder with `config.json` and weights.
        kind: one of `MODEL_CLASSES`.
        dtype: data type of the weights.
        options: further arguments of transformers' `from_pretrained`.

    Raises:
        SettingsError: the folder holds no model of this kind, or weights are missing, which transformers would
            initialize at random.
    """
    if not (folder / "config.json").is_file():
        raise SettingsError(f"{folder} has no config.json; model.path must be a model folder in Hugging Face format")
    disable_progress_bar()
    try:
        model, loading_info = MODEL_CLASSES[kind].from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
    except SafetensorError as error:
        raise SettingsError(
            f"{_damaged_file(folder)}: not a complete safetensors file: {error}; copy it again"
        ) from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise SettingsError(
            f"{folder}: transformers cannot load it as a {kind}: {why}; copy it again, or "
            "set model.path to another folder"
        ) from error
    if missing := sorted(loading_info["missing_keys"]):
        raise SettingsError(
            f"{folder}: not a complete {kind}: its files lack the weights {_join(missing)}; "
            "copy it again, or set model.path to another folder"
        )
    return model.eval()


def _damaged_file(folder: Path) -> Path:
    """Return the first damaged weight file; the folder if none is damaged."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file
    return folder


class EngineAccess(AccessRules, frozen=True, kw_only=True):
    """Which requests a local engine answers, and which weights it takes."""

    weight_folders: tuple[Path, ...] = ()
    """Folders whose files may become weights without a digest: the run's."""


def check_path(path: Path, folders: Sequence[Path], files: Sequence[WeightFile]) -> None:
    """Refuse weights that are neither in one of the folders nor have the given digests. Blocks: it reads the files.

    Args:
        path: model folder, or a safetensors file.
        folders: folders whose files are trusted.
        files: size and digest of each file, by name; empty: only the place counts.

    Raises:
        EngineRefusedError: the weights are not trusted, or a file differs from its digest.
    """
    try:
        found = weight_files(path)
        if files:
            _check_digests(found, {file.name: file for file in files})
        elif not all(_lies_in(file.resolve(), folders) for file in found):
            trusted = " or ".join(str(folder) for folder in folders)
            raise EngineRefusedError(f"{path} is not in {trusted}: {NEEDS_DIGESTS}, or serve the run's settings file")
    except (OSError, ValueError) as error:
        raise EngineRefusedError(f"{path}: cannot be read as safetensors: {error}; the old weights stay") from error


def _check_digests(found: Sequence[Path], files: dict[str, WeightFile]) -> None:
    for file in found:
        expected = files.get(file.name)
        if expected is None:
            raise EngineRefusedError(f"{file}: the update has no digest of it; the old weights stay")
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != expected.sha256:
            raise EngineRefusedError(f"{file} has sha256 {digest} instead of {expected.sha256}; the old weights stay")


def _lies_in(file: Path, folders: Sequence[Path]) -> bool:
    return any(file.is_relative_to(folder.resolve()) for folder in folders)
