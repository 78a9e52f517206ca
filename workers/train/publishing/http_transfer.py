"""Weights as files that engines download from the trainer: for hosts without a shared file system.

A small server in the trainer. It gives the files of the last versions, and nothing else, to whoever knows a path that
cannot be guessed; the engines are told it with each push.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import anyio.to_thread
import structlog
from aiohttp import web

from stream.errors import EngineError, SettingsError
from workers.engine_api.wire import WEIGHT_TRANSFER_BACKEND
from workers.runtime.http_server import listen, server_url
from workers.settings.training import LOOPBACK_HOSTS
from workers.train.publishing.engine_control import EngineControlClient

log = structlog.get_logger()

_OFFERED_VERSIONS = 3
"""Versions that can be downloaded: as many as are kept on disk."""
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


class HttpTransfer:
    """Engines download the folder; a `Carrier`.

    Args:
        base: URL under which `app` is reached, set once it listens.
    """

    backend: ClassVar[str] = WEIGHT_TRANSFER_BACKEND
    start_hint: ClassVar[str] = ", with penstock-vllm installed beside vLLM"

    def __init__(self) -> None:
        self.base_url = ""
        self._secret = secrets.token_urlsafe(32)
        self._offers: OrderedDict[str, _OfferedFolder] = OrderedDict()

    def application(self) -> web.Application:
        """What serves them."""
        app = web.Application()
        app.router.add_get("/{secret}/{offer}/{file}", self._file)
        return app

    async def prepare(self, path: Path) -> None:
        """Hash the files, and offer them under a name of their own."""
        if any(offer.folder == path for offer in self._offers.values()):
            return
        files = await anyio.to_thread.run_sync(_file_manifest, path)
        self._offers[secrets.token_hex(8)] = _OfferedFolder(path, files)
        while len(self._offers) > _OFFERED_VERSIONS:
            self._offers.popitem(last=False)

    async def transfer(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """Tell where to download it; see `Carrier`."""
        name, offer = next(((name, offer) for name, offer in self._offers.items() if offer.folder == path), ("", None))
        if offer is None:
            raise EngineError(f"{path} is not offered any more: there are {_OFFERED_VERSIONS} newer versions")
        await engine.start_update()
        await engine.update_weights({"url": f"{self.base_url}/{self._secret}/{name}/", "files": offer.files})
        await engine.finish_update(version)

    async def _file(self, http: web.Request) -> web.StreamResponse:
        offer = self._offers.get(http.match_info["offer"])
        name = http.match_info["file"]
        known = secrets.compare_digest(http.match_info["secret"].encode(), self._secret.encode())
        if not known or offer is None or all(file["name"] != name for file in offer.files):
            raise web.HTTPNotFound
        return web.FileResponse(offer.folder / name)


class _OfferedFolder:
    def __init__(self, folder: Path, files: list[dict[str, Any]]) -> None:
        self.folder = folder
        self.files = files


@asynccontextmanager
async def serve_weights(host: str, port: int) -> AsyncIterator[HttpTransfer]:
    """Serve weights while the context is open.

    Args:
        host: by which engines reach this machine. A name of the machine itself keeps the server to itself.
        port: 0 for a free one.

    Raises:
        SettingsError: the port is taken.
    """
    served = HttpTransfer()
    try:
        async with listen(served.application(), _bind_address(host), port) as url:
            served.base_url = server_url(host, int(url.rpartition(":")[2]))
            log.info("weights.served", url=served.base_url)
            yield served
    except EngineError as error:
        if served.base_url:
            raise
        raise SettingsError(f"run.address: {error}") from error


def _bind_address(host: str) -> str:
    """Where to listen, for those who know this machine by that name."""
    if host in LOOPBACK_HOSTS:
        return "::1" if host == "::1" else "127.0.0.1"
    return "::" if ":" in host else "0.0.0.0"  # noqa: S104


def _file_manifest(folder: Path) -> list[dict[str, Any]]:
    """Name, size and digest of each file that holds weights."""
    found = []
    for file in sorted({file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)}):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        found.append({"name": file.name, "size": file.stat().st_size, "sha256": digest})
    if not found:
        raise EngineError(f"{folder} holds no safetensors files")
    return found
