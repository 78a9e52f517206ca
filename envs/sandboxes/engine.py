"""Requests to a Docker or Podman engine: deadlines, errors as `SandboxFailure`, commands, and files as archives."""

import base64
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import anyio
from aiodocker import Docker
from aiodocker.exceptions import DockerError
from anyio import to_thread
from msgspec import Struct

from envs.sandboxes.contract import FailureKind, SandboxFailure

_NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})
_NO_CONNECTION: Final = 900
"""Status by which aiodocker says that a connection failed."""
_GO_TYPE_BITS: Final = 1 << 31 | 1 << 27 | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
"""Bits of Go's FileMode that a regular file does not have."""
_FULL: Final = ("no space left", "not enough memory", "cannot allocate memory", "too many open files")
_ARCHIVE_OVERHEAD: Final = 64 << 10


class Output(Struct):
    """What a command in a container has written."""

    stdout: bytes
    stderr: bytes


def find_address() -> str:
    """Return where the engine's own tools would look: `DOCKER_HOST`, or a usual socket. Blocks: it reads folders.

    Raises:
        SandboxFailure: there is none.
    """
    if address := os.environ.get("DOCKER_HOST"):
        return address
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    places = ["/run/docker.sock", "/var/run/docker.sock", f"{runtime_folder}/docker.sock"]
    places += [f"{Path.home()}/.docker/run/docker.sock", "/run/podman/podman.sock"]
    places.append(f"{runtime_folder}/podman/podman.sock")
    for place in places:
        if Path(place).is_socket():
            return f"unix://{place}"
    looked = ", ".join(places)
    raise SandboxFailure(
        FailureKind.UNREACHABLE,
        f"no Docker or Podman engine: DOCKER_HOST is not set, and none of {looked} is a socket; start an engine, or "
        "set sandboxes.address",
    )


class Engine:
    """A connection to an engine. Made on the event loop that uses it.

    Args:
        address: `unix://…`, `tcp://…`, as in DOCKER_HOST.
        call_timeout_s: deadline of a request, where no other is given.
        long_timeout_s: deadline of requests that copy many files.
    """

    def __init__(self, address: str, call_timeout_s: float, long_timeout_s: float) -> None:
        self.address = address
        self.call_timeout_s = call_timeout_s
        self.long_timeout_s = long_timeout_s
        self._connector: aiohttp.BaseConnector | None = None
        if address.startswith(
            "unix://"
        ):  # without aiohttp's limit of 100 connections: each command in progress has one
            self._connector = aiohttp.UnixConnector(address.removeprefix("unix://"), limit=0)
            self.client = Docker(url="unix://localhost", connector=self._connector)
        else:
            self.client = Docker(url=address)

    async def close(self) -> None:
        """Close all connections."""
        await self.client.close()
        if self._connector is not None:
            await self._connector.close()

    @contextmanager
    def request(
        self, what: str, kind: FailureKind = FailureKind.UNREACHABLE, timeout_s: float | None = None
    ) -> Iterator[None]:
        """Give requests a deadline, and raise what fails as a `SandboxFailure`.

        Args:
            what: is asked of the engine, for the message.
            kind: of the failure if the engine answers with an error.
            timeout_s: deadline; None: `call_timeout_s`.
        """
        deadline_s = self.call_timeout_s if timeout_s is None else timeout_s
        try:
            with anyio.fail_after(deadline_s):
                yield
        except DockerError as error:
            if error.status == _NO_CONNECTION:
                raise self._unreachable(what, error.message) from error
            full = any(words in error.message.lower() for words in _FULL)
            raise SandboxFailure(
                FailureKind.FULL if full else kind, f"{what}: the engine at {self.address} says: {error.message}"
            ) from error
        except TimeoutError as error:
            raise self._unreachable(what, f"it has not answered within {deadline_s:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._unreachable(what, str(error) or type(error).__name__) from error

    def _unreachable(self, what: str, why: str) -> SandboxFailure:
        return SandboxFailure(
            FailureKind.UNREACHABLE, f"{what}: the engine at {self.address} cannot be reached: {why}; is it running?"
        )

    async def call(self, path: str, method: str = "GET", *, body: Any = None, **parameters: Any) -> Any:
        """Make a request that aiodocker has no method for, or whose method reads more than is needed.

        Raises:
            DockerError: the engine answered with an error.
        """
        data = json.dumps(body) if body is not None else None
        async with self._response(path, method, data, parameters) as response:
            text = await response.text()
        return json.loads(text) if text else None

    @asynccontextmanager
    async def _response(
        self, path: str, method: str, data: str | io.BytesIO | None, parameters: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Content-Type": "application/x-tar" if isinstance(data, io.BytesIO) else "application/json"}
        plain = {key: int(value) if isinstance(value, bool) else value for key, value in parameters.items()}
        url = f"{self.client.docker_host}/{self.client.api_version}/{path}"
        request = self.client.session.request(method, url, params=plain, data=data, headers=headers)
        async with request as response:
            if response.status >= 400:
                raise DockerError(response.status, _message(await response.text()))
            yield response

    async def run(
        self,
        container: str,
        command: Sequence[str],
        max_bytes: int,
        *,
        user: str = "",
        env: Mapping[str, str] = _NO_VARIABLES,
    ) -> Output:
        """Run a command in a container, and return what it has written until its streams end, or break.

        Args:
            container: its name.
            command: program and arguments.
            max_bytes: what is written beyond them is not read.
            user: empty: the container's.
            env: variables in addition to the container's.

        Raises:
            DockerError: the engine answered with an error.
        """
        execution = await self.client.containers.container(container).exec(
            list(command), user=user, environment=dict(env) or None, workdir="/"
        )
        parts: dict[int, list[bytes]] = {1: [], 2: []}
        size = 0
        stream = execution.start(detach=False)
        try:
            while size <= max_bytes and (message := await stream.read_out()) is not None:
                parts.setdefault(message.stream, []).append(message.data)
                size += len(message.data)
        finally:
            with suppress(AssertionError):  # aiodocker's, if the connection is gone already
                await stream.close()
        return Output(b"".join(parts[1]), b"".join(parts[2]))

    async def read_file(self, container: str, path: str, max_bytes: int) -> bytes:
        """Return the content of a regular file in a container, running or not.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no regular file, or has more than `max_bytes`.
            DockerError: the engine answered with another error.
        """
        content = bytearray()
        try:
            async with self._response(f"containers/{container}/archive", "GET", None, {"path": path}) as response:
                described = json.loads(base64.b64decode(response.headers["X-Docker-Container-Path-Stat"]))
                if described["mode"] & _GO_TYPE_BITS:
                    raise ValueError(f"{path} is no regular file")
                if described["size"] > max_bytes:
                    raise ValueError(f"{path} has {described['size']} bytes, more than {max_bytes}")
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > max_bytes + _ARCHIVE_OVERHEAD:
                        raise ValueError(f"{path} has more than {max_bytes} bytes")
        except DockerError as error:
            if error.status == 404 and "no such container" not in error.message.lower():
                raise FileNotFoundError(path) from error
            raise
        return await to_thread.run_sync(_only_file, bytes(content), path, max_bytes)

    async def write_files(self, container: str, files: Mapping[str, bytes | Path], *, for_all: bool = False) -> None:
        """Write files, and folders of this machine, as root's into a container, running or not.

        Args:
            container: its name.
            files: contents by absolute path.
            for_all: every user may read them, also those of this machine that others may not.

        Raises:
            DockerError: the engine answered with an error.
            OSError: a file of this machine cannot be read.
        """
        archive = await to_thread.run_sync(_archive, files, for_all)
        async with self._response(f"containers/{container}/archive", "PUT", archive, {"path": "/"}) as response:
            await response.read()

    async def inspect(self, container: str, *, size: bool = False) -> dict[str, Any]:
        """Return what the engine knows of a container.

        Raises:
            DockerError: status 404: there is none.
        """
        found = await self.call(f"containers/{quote(container)}/json", size=size)
        return found if isinstance(found, dict) else {}


def _message(answer: str) -> str:
    """Return what the engine says in the answer to a request that failed."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(answer)["message"])
    return answer[:1000]


def _only_file(archive: bytes, path: str, max_bytes: int) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r|") as members:
        for member in members:
            if not member.isreg():
                break
            if member.size > max_bytes:
                raise ValueError(f"{path} has {member.size} bytes, more than {max_bytes}")
            content = members.extractfile(member)
            return content.read() if content is not None else b""
    raise ValueError(f"{path} is no regular file")


def _archive(files: Mapping[str, bytes | Path], for_all: bool) -> io.BytesIO:
    """Return a tar archive of files by their absolute paths, owned by root."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        if for_all:
            member.mode |= 0o555 if member.isdir() or member.mode & 0o100 else 0o444
        member.uname = member.gname = ""
        return member

    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for path, content in files.items():
            name = path.lstrip("/")
            if isinstance(content, Path):
                archive.add(content, name, filter=owned)
                continue
            member = owned(tarfile.TarInfo(name))
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    written.seek(0)
    return written
