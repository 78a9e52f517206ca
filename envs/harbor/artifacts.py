"""What a task's policy hands to a separate verifier: declared files, carried by way of this machine.

The archive is made in the policy's sandbox, so its names are not believed: links, devices, and what lies outside of a
declared source are left out.
"""

import io
import secrets
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

import anyio
from anyio import to_thread

from envs.harbor.config import ArtifactTable
from envs.harbor.task_sandboxes import ROOT, SETUP_TIMEOUT_S
from envs.sandboxes.contract import Sandbox

MAX_BYTES: Final = 256 << 20
"""Largest archive of one artifact; a larger one is left out, as a missing one is."""
MAX_FILES: Final = 20_000


async def fetch_artifacts(sandbox: Sandbox, artifacts: Sequence[ArtifactTable], folder: Path) -> dict[str, Path]:
    """Copy artifacts out of a sandbox. One that is missing, too large or cannot be packed is left out.

    Args:
        sandbox: where they are.
        artifacts: what to copy.
        folder: an empty folder of this machine.

    Returns:
        By the path in the sandbox, the copy: a file or a folder.

    Raises:
        SandboxEndedError: the sandbox has ended.
    """
    copies: dict[str, Path] = {}
    for number, artifact in enumerate(artifacts):
        source = PurePosixPath(artifact.source)
        archive = f"/tmp/penstock-{secrets.token_hex(8)}.tar"  # noqa: S108  (of the sandbox)
        relative = source.as_posix().lstrip("/") or "."
        excluded = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in artifact.exclude)
        pack = f"tar -C / {excluded} -cf {archive} {shlex.quote(relative)}"
        packed = await sandbox.exec(["sh", "-c", pack], timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")
        if packed.code:
            continue
        try:
            content = await sandbox.read(archive, MAX_BYTES)
        except (FileNotFoundError, ValueError):
            continue
        target = folder / str(number)
        copy = await to_thread.run_sync(unpack, content, source, target)
        await sandbox.exec(["rm", "-f", archive], timeout_s=SETUP_TIMEOUT_S, user=ROOT, cwd="/")
        if copy is not None:
            copies[artifact.source] = copy
    return copies


def unpack(archive: bytes, source: PurePosixPath, folder: Path) -> Path | None:
    """Unpack the regular files of an archive that lie in its source; what cannot be read ends it.

    Returns:
        The copy of the source; None if the archive has none.
    """
    folder.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            for count, member in enumerate(packed):
                path = PurePosixPath("/", member.name)
                is_inside = path.is_relative_to(source) and ".." not in path.parts
                if is_inside and count < MAX_FILES and (member.isreg() or member.isdir()):
                    packed.extract(member, folder, filter="data")
    except (tarfile.TarError, OSError, ValueError, EOFError):  # the policy wrote it
        pass
    copy = folder.joinpath(*source.parts[1:])
    return copy if copy.exists() else None


@asynccontextmanager
async def temporary_folder() -> AsyncIterator[Path]:
    """Yield an empty folder of this machine, which is removed afterwards."""
    folder = Path(await to_thread.run_sync(partial(tempfile.mkdtemp, prefix="penstock-artifacts-")))
    try:
        yield folder
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))
