"""Downloads the files of an update over HTTP and checks their sizes and digests."""

import hashlib
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from penstock_vllm.errors import FailedError, RefusedError

_READ_TIMEOUT_S = 60.0
"""Seconds without a byte after which a download fails."""
_CHUNK = 1 << 20
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores proxy settings: weights come directly from the trainer."""


def download(url: str, files: list[Mapping[str, Any]]) -> tempfile.TemporaryDirectory[str]:
    """Download files to a temporary folder and check them.

    Args:
        url: URL of their folder, ending in a slash.
        files: `name`, `size` in bytes and `sha256` in hex digits of each file.

    Returns:
        The folder; the caller cleans it up.

    Raises:
        RefusedError: the URL or the list is invalid, or the server answers 4xx for a file.
        FailedError: a file did not arrive, or has another size or digest.
    """
    if not url.startswith(("http://", "https://")) or not url.endswith("/") or not files:
        raise RefusedError(f"{url!r} with {len(files)} files: need an http(s) URL that ends in a slash, and files")
    folder = tempfile.TemporaryDirectory(prefix="penstock-weights-")
    try:
        for entry in files:
            name, size, digest = _entry(entry)
            _download(url + name, Path(folder.name) / name, size, digest)
    except BaseException:
        folder.cleanup()
        raise
    return folder


def _entry(entry: Mapping[str, Any]) -> tuple[str, int, str]:
    try:
        name, size, digest = entry["name"], entry["size"], entry["sha256"]
    except (KeyError, TypeError) as error:
        raise RefusedError(f"a file needs name, size and sha256, got {entry!r}") from error
    if not isinstance(name, str) or Path(name).name != name or name in {"", ".", ".."} or not isinstance(size, int):
        raise RefusedError(f"a file needs a plain name and a size, got {entry!r}")
    return name, size, str(digest)


def _download(url: str, file: Path, size: int, digest: str) -> None:
    hashed, came = hashlib.sha256(), 0
    try:
        with _OPENER.open(url, timeout=_READ_TIMEOUT_S) as answer, file.open("wb") as written:
            while came <= size and (chunk := answer.read(_CHUNK)):
                written.write(chunk)
                hashed.update(chunk)
                came += len(chunk)
    except HTTPError as error:
        kind = RefusedError if 400 <= error.code < 500 else FailedError
        raise kind(f"{file.name}: its server answers {error.code}") from error
    except (URLError, OSError, ValueError) as error:
        raise FailedError(f"{file.name} did not come over HTTP: {error}") from error
    if came != size:
        raise FailedError(f"{file.name} came with {came} bytes{' and more' if came > size else ''} instead of {size}")
    if hashed.hexdigest() != digest:
        raise FailedError(f"{file.name} came with sha256 {hashed.hexdigest()} instead of {digest}")
