"""Images on an engine: resolved to digests, built once for each content of a folder, and bounded in number."""

import hashlib
import io
import os
import re
import tarfile
import time
from pathlib import Path
from typing import Any, Final

import anyio
from aiodocker.exceptions import DockerError
from anyio import to_thread

from envs.sandboxes.contract import FailureKind, ImageBuildError, SandboxFailure
from envs.sandboxes.engine import Engine

BUILD_LABEL: Final = "penstock.build"
"""Label of an image that was built here: the hash of the folder's content."""
_REPOSITORY: Final = "penstock-build"
_REPOSITORY_OF: Final = re.compile(r"(:[\w.-]+)?(@[\w:]+)?\Z")
"""What follows an image's repository: tag, digest."""
_MAX_CONTEXT_BYTES: Final = 1 << 30
_LAST_LINES: Final = 20


class Images:
    """The images of one engine.

    Args:
        engine: where they are.
        pull_timeout_s: deadline of a download.
        keep_gb: built images beyond this size are removed before another is built, the longest unused first.
    """

    def __init__(self, engine: Engine, pull_timeout_s: float, keep_gb: float) -> None:
        self._engine = engine
        self._pull_timeout_s = pull_timeout_s
        self._keep_gb = keep_gb
        self._used: dict[str, float] = {}  # built image's id -> monotonic time
        self._details: dict[str, dict[str, Any]] = {}  # by name that names content: never another one
        self._building = anyio.Lock()

    async def resolve(self, image: str) -> str:
        """Return the digest of an image by its name, or its id if no registry gave it a digest; pull a missing one.

        Raises:
            SandboxFailure: kind `image`: there is none.
        """
        details = await self.details(image)
        repository = _REPOSITORY_OF.sub("", image)
        digests = [digest for digest in details.get("RepoDigests") or () if digest.startswith(f"{repository}@")]
        return str(digests[0] if digests else details["Id"])

    async def details(self, image: str) -> dict[str, Any]:
        """Return what the engine knows of an image, which is pulled if it is missing.

        Raises:
            SandboxFailure: kind `image`: there is none.
        """
        if image in self._details:
            return self._details[image]
        what = f"image {image!r}"
        with self._engine.request(what, FailureKind.IMAGE, self._pull_timeout_s):
            found = await self._find(image)
            if found is None:
                await self._engine.client.images.pull(image)
                found = await self._find(image)
        if found is None:
            raise SandboxFailure(FailureKind.IMAGE, f"{what} is not on the engine at {self._engine.address}")
        if "sha256:" in image:
            self._details[image] = found
        self._used[found["Id"]] = time.monotonic()
        return found

    def forget(self, image: str) -> None:
        """Ask the engine again for an image that turned out to be missing."""
        self._details.pop(image, None)

    async def build(self, folder: Path, timeout_s: float) -> str:
        """Return the id of the image that a folder's `Dockerfile` makes, built unless the engine has it.

        Args:
            folder: the build's context; the image is named by its content.
            timeout_s: deadline of the build.

        Raises:
            ImageBuildError: the Dockerfile does not build; the message has the build's last lines.
            SandboxFailure: the engine cannot build.
        """
        context, content_hash = await to_thread.run_sync(_build_context, folder)
        tag = f"{_REPOSITORY}:{content_hash[:32]}"
        async with self._building:
            with self._engine.request(f"image {tag}"):
                found = await self._find(tag)
            if found is None:
                await self._make_room()
                await self._build(context, tag, content_hash, timeout_s)
                with self._engine.request(f"image {tag}"):
                    found = await self._find(tag)
        if found is None:
            raise SandboxFailure(FailureKind.IMAGE, f"image {tag} of {folder} was built, and is gone again")
        self._used[found["Id"]] = time.monotonic()
        return str(found["Id"])

    async def _build(self, context: bytes, tag: str, content_hash: str, timeout_s: float) -> None:
        lines: list[str] = []
        request = self._engine.client.images.build(
            fileobj=io.BytesIO(context),
            encoding="identity",
            tag=tag,
            rm=True,
            forcerm=True,
            labels={BUILD_LABEL: content_hash},
            stream=True,
        )
        with self._engine.request(f"build of {tag}", FailureKind.IMAGE, timeout_s):
            try:
                async for progress in request:
                    lines += str(progress.get("stream", "")).splitlines()
                    del lines[:-_LAST_LINES]
            except DockerError as error:
                if error.status in (0, 400):  # an instruction failed, or is none
                    raise ImageBuildError("\n".join([*lines, error.message])) from error
                raise

    async def _make_room(self) -> None:
        """Remove built images, the longest unused first, until the others are within the bound."""
        with self._engine.request("the list of built images"):
            images = await self._engine.client.images.list(filters={"label": [BUILD_LABEL]})
        size = sum(image["Size"] for image in images)
        for image in sorted(images, key=lambda image: (self._used.get(image["Id"], 0.0), image["Created"])):
            if size <= self._keep_gb * 1e9:
                return
            with self._engine.request(f"removal of image {image['Id']}"):
                try:
                    await self._engine.client.images.delete(image["Id"])
                except DockerError as error:
                    if error.status not in (404, 409):  # gone, or in use
                        raise
                    continue
            size -= image["Size"]

    async def _find(self, image: str) -> dict[str, Any] | None:
        try:
            return await self._engine.client.images.inspect(image)
        except DockerError as error:
            if error.status == 404:
                return None
            raise


def _build_context(folder: Path) -> tuple[bytes, str]:
    """Return a folder as a tar archive that only its content decides, and its hash."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for path in sorted(_paths(folder)):
            member = archive.gettarinfo(path, str(path.relative_to(folder)))
            member.uid = member.gid = member.mtime = 0
            member.uname = member.gname = ""
            if not member.isreg():
                archive.addfile(member)
                continue
            if written.tell() + member.size > _MAX_CONTEXT_BYTES:
                raise ImageBuildError(
                    f"{folder} has more than {_MAX_CONTEXT_BYTES >> 20} MB: download in the Dockerfile"
                )
            with path.open("rb") as content:
                archive.addfile(member, content)
    context = written.getvalue()
    return context, hashlib.sha256(context).hexdigest()


def _paths(folder: Path) -> list[Path]:
    return [Path(parent) / name for parent, folders, files in os.walk(folder) for name in (*folders, *files)]
