"""Whole weights over HTTP, for hosts without a shared file system: engines download the files from the trainer.

A small server in the trainer serves the files of the last versions under a path that cannot be guessed; each push sends
that path to the engines, with names, sizes and digests of the files.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import anyio.to_thread
import structlog
from aiohttp import web
from msgspec import Struct

from stream.errors import EngineError, SettingsError
from workers.engine_api.http_access import AccessRules
from workers.engine_api.http_server import listen, server_url
from workers.engine_api.wire import WEIGHT_TRANSFER_BACKEND
from workers.settings.training import LOOPBACK_HOSTS
from workers.train.publishing.engine_control import EngineControlClient

log = structlog.get_logger()

_OFFERED_VERSIONS = 3
"""Versions that can be downloaded, as many as are kept on disk."""


class HttpTransfer:
    """Serves the files of the last versions and sends their URL to engines. A `Transfer`.

    Args:
        server: serves the files.
        base_url: where engines reach the server.
    """

    backend: ClassVar[str] = WEIGHT_TRANSFER_BACKEND
    start_hint: ClassVar[str] = ", with penstock-vllm installed beside vLLM"

    def __init__(self, server: "WeightServer", base_url: str) -> None:
        self.server = server
        self.base_url = base_url

    async def prepare(self, path: Path) -> None:
        """Hash the files and serve them."""
        await self.server.offer(path)

    async def transfer(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """Send the URL and the file manifest; see `Transfer`."""
        offered = self.server.find(path)
        if offered is None:
            raise EngineError(f"{path} is no longer served: there are {_OFFERED_VERSIONS} newer versions")
        await engine.start_update()
        await engine.update_weights({"url": self.base_url + offered.url_path, "files": offered.files})
        await engine.finish_update(version)


class OfferedFolder(Struct, frozen=True):
    """A folder whose weight files can be downloaded."""

    folder: Path
    url_path: str
    files: list[dict[str, Any]]
    """Name, size and digest of each file."""


class WeightServer:
    """Serves the weight files of the last few folders under paths that cannot be guessed."""

    def __init__(self) -> None:
        self._secret = secrets.token_urlsafe(32)
        self._offered: OrderedDict[str, OfferedFolder] = OrderedDict()

    def application(self) -> web.Application:
        """Return the application that serves the files."""
        app = web.Application()
        app.router.add_get("/{secret}/{offer}/{file}", self._serve_file)
        return app

    async def offer(self, folder: Path) -> None:
        """Serve a folder's weight files; the oldest folder beyond the limit is no longer served."""
        if self.find(folder) is not None:
            return
        name = secrets.token_hex(8)
        files = await anyio.to_thread.run_sync(file_manifest, folder)
        self._offered[name] = OfferedFolder(folder, f"/{self._secret}/{name}/", files)
        while len(self._offered) > _OFFERED_VERSIONS:
            self._offered.popitem(last=False)

    def find(self, folder: Path) -> OfferedFolder | None:
        """Return how a folder is served; None if it is not."""
        return next((offered for offered in self._offered.values() if offered.folder == folder), None)

    async def _serve_file(self, request: web.Request) -> web.StreamResponse:
        """Send a weight file; 404 without the secret."""
        offered = self._offered.get(request.match_info["offer"])
        name = request.match_info["file"]
        has_secret = secrets.compare_digest(request.match_info["secret"].encode(), self._secret.encode())
        if not has_secret or offered is None or all(file["name"] != name for file in offered.files):
            raise web.HTTPNotFound
        return web.FileResponse(offered.folder / name)


@asynccontextmanager
async def serve_weights(host: str, port: int) -> AsyncIterator[HttpTransfer]:
    """Serve weights for as long as the context is open.

    Args:
        host: name or address at which engines reach this machine. With a loopback name the server is not reachable from
            other machines.
        port: 0 for a free one.

    Raises:
        SettingsError: the port is taken.
    """
    server, is_listening = WeightServer(), False
    try:
        rules = AccessRules(host=_bind_address(host), names=(host.lower(),))
        async with listen(server.application(), rules.host, port, rules=rules) as url:
            is_listening = True
            base_url = server_url(host, int(url.rpartition(":")[2]))
            log.info("weights.served", url=base_url)
            yield HttpTransfer(server, base_url)
    except EngineError as error:
        if is_listening:
            raise
        raise SettingsError(f"run.address: {error}") from error


def _bind_address(host: str) -> str:
    """Return the address to listen at: loopback if engines use a loopback name, else all interfaces."""
    if host in LOOPBACK_HOSTS:
        return "::1" if host == "::1" else "127.0.0.1"
    return "::" if ":" in host else "0.0.0.0"  # noqa: S104


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
