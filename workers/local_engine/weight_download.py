"""Download new weights over HTTP to a temporary folder, and verify them."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import anyio.to_thread

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import WeightFile

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
