"""Which local files may become weights: those of the run's own folder, and those whose digests the run sends.

Every program that reaches the engine's port can name a path. So a path alone is not enough: it must lie where the run
writes, or come with the digest of each file, which only a program that knows the weights can send.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from stream.errors import EngineRefusedError
from workers.engine_api.http_access import AccessRules
from workers.engine_api.wire import NEEDS_DIGESTS, WeightFile
from workers.local_engine.weight_loader import weight_files


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
