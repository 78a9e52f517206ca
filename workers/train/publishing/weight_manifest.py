"""Names, sizes and digests of the weight files of a policy version, as engines check them."""

import hashlib
from pathlib import Path
from typing import Any, Final

from stream.errors import EngineError

_WEIGHT_FILES: Final = ("*.safetensors", "*.safetensors.index.json")


def file_manifest(folder: Path) -> list[dict[str, Any]]:
    """Return name, size and digest of each weight file. Blocks: it reads the files.

    Raises:
        EngineError: there are none.
    """
    found = []
    for file in sorted({file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)}):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        found.append({"name": file.name, "size": file.stat().st_size, "sha256": digest})
    if not found:
        raise EngineError(f"{folder} holds no safetensors files")
    return found
