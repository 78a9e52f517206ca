"""What of a Pod's files differs from its image, and archives of it, as plain functions and records of this worker."""

import io
import posixpath
import shlex
import tarfile
import tempfile
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from envs.sandboxes.contract import ChangedFile, FailureKind, SandboxFailure

_PREFIX: Final = "penstock-changes-"
_ARGUMENT_BYTES: Final = 1 << 16
_KEPT_BASELINES: Final = 32


class Snapshot(Struct, frozen=True):
    """Files that changed in a Pod, in archives of this worker."""

    owner: str
    """Name of the sandbox."""
    image: str
    archive: Path
    changes: tuple[ChangedFile, ...]
    """What the archive holds, and what is gone."""


class Snapshots:
    """The snapshots of this worker, in a folder that ends with it."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._by_id: dict[str, Snapshot] = {}

    def folder(self) -> Path:
        """Return a new folder for a snapshot. Blocks."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="penstock-pods-")
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def add(self, snapshot: Snapshot) -> str:
        """Keep a snapshot; returns what names it."""
        key = f"{_PREFIX}{uuid.uuid4().hex}"
        self._by_id[key] = snapshot
        return key

    def find(self, image: str) -> Snapshot | None:
        """Return the snapshot that an image's name means; None for an image.

        Raises:
            SandboxFailure: it is another worker's, or was removed.
        """
        if image.startswith(_PREFIX) and image not in self._by_id:
            message = f"there is no snapshot {image}: those of Pods end with their worker, and with their sandbox"
            raise SandboxFailure(FailureKind.IMAGE, message)
        return self._by_id.get(image)

    def drop(self, owner: str) -> None:
        """Remove the snapshots of a sandbox. Blocks."""
        for key in [key for key, one in self._by_id.items() if one.owner == owner]:
            self._by_id.pop(key).archive.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all. Blocks."""
        if self._folder is not None:
            self._folder.cleanup()


class Baselines:
    """The paths that images have, as a Pod listed them before anything ran in it."""

    def __init__(self) -> None:
        self._by_image: OrderedDict[str, bytes] = OrderedDict()

    def __contains__(self, image: str) -> bool:
        return image in self._by_image

    def add(self, image: str, listing: bytes) -> None:
        """Keep the paths of an image. Blocks: it compresses them."""
        self._by_image[image] = zlib.compress(listing)
        while len(self._by_image) > _KEPT_BASELINES:
            self._by_image.popitem(last=False)

    def paths(self, image: str) -> set[str] | None:
        """Return the paths of an image; None if no Pod of this worker has listed them. Blocks."""
        listing = self._by_image.get(image)
        return None if listing is None else set(lines(zlib.decompress(listing)))


class Changes(Struct, frozen=True):
    """Where a Pod says that it differs from its image."""

    newer: dict[str, bool]
    """Path -> whether it is a folder, of all that changed."""
    deleted: list[str]

    def files(self, image: set[str] | None) -> list[ChangedFile]:
        """Return the changes, sorted; of an image's own folders none.

        Args:
            image: the paths that its image has; None: that is not known, so each is taken to be in it.
        """
        found = [
            ChangedFile(path, "modified" if image is None or path in image else "added")
            for path, is_folder in self.newer.items()
            if not is_folder or (image is not None and path not in image)
        ]
        return sorted([*found, *(ChangedFile(path, "deleted") for path in self.deleted)], key=lambda one: one.path)


def find_changes(listing: bytes, begun: str, image: set[str] | None) -> Changes:
    """Return the changes in what `find` and `stat` print of a Pod.

    Args:
        listing: a line `TIME|KIND|PATH` for each path that may have changed, an empty line, and every path there is.
        begun: the time of the Pod's start, as in the lines.
        image: the paths that its image has; None: that is not known.
    """
    changed, _, present = listing.partition(b"\n\n")
    fields = (line.split("|", 2) for line in lines(changed))
    newer = {one[2]: one[1] == "directory" for one in fields if len(one) == 3 and one[0] > begun and one[2] != "/"}
    gone = image - set(lines(present)) if image is not None else set()
    return Changes(newer, [path for path in gone if str(Path(path).parent) not in gone])


def repack(parts: Iterable[Path], archive: Path) -> dict[str, bool]:
    """Write one archive of what a Pod's own `tar` sent, and return what is in it: path -> whether it is a folder.

    The archive is written anew, so it holds what was read here and nothing else: `tar` may be the policy's. Nothing
    goes through a link, which would write elsewhere than its name says. Blocks.
    """
    held: dict[str, bool] = {}
    links: set[str] = set()
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as target:
        for part in parts:
            with suppress(tarfile.TarError, EOFError), tarfile.open(part) as source:
                for member in source:
                    path = posixpath.normpath(f"/{member.name}")
                    if links.intersection(map(str, Path(path).parents)) or ".." in member.name.split("/"):
                        continue
                    if member.issym():
                        links.add(path)
                    member.pax_headers = {}
                    target.addfile(member, source.extractfile(member) if member.isreg() else None)
                    held[path] = member.isdir()
    return held


def pack(archive: Path, files: Mapping[str, bytes | Path]) -> int:
    """Write an archive of files by their absolute paths; returns its size. Blocks."""
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        for path, content in files.items():
            if isinstance(content, Path):
                tar.add(content, arcname=path.lstrip("/"))
                continue
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode, entry.mtime = len(content), 0o644, int(time.time())
            tar.addfile(entry, io.BytesIO(content))
    return archive.stat().st_size


def lines(text: bytes) -> list[str]:
    """Return the lines of what a Pod prints, whatever bytes are in them."""
    return text.decode(errors="surrogateescape").split("\n")


def as_arguments(paths: Iterable[str]) -> list[bytes]:
    """Return paths as arguments of a shell's `set`, as much as fits in one command each."""
    parts: list[bytes] = []
    for path in paths:
        word = shlex.quote(path).encode(errors="surrogateescape") + b" "
        if not parts or len(parts[-1]) + len(word) > _ARGUMENT_BYTES:
            parts.append(b"")
        parts[-1] += word
    return parts
