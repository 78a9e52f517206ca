"""A Docker engine for tests, and an image on it that needs no registry: busybox's programs as a root file system."""

import io
import shutil
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

from aiodocker.exceptions import DockerError

from envs.sandboxes.contract import FailureKind, SandboxFailure
from envs.sandboxes.engine import Engine, find_address

IMAGE = "penstock-test:busybox"
_USERS = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n"


def busybox() -> Path | None:
    """Return the path of a busybox that is linked statically; None if there is none."""
    found = shutil.which("busybox")
    if found is None or b"not a dynamic" not in subprocess.run(["ldd", found], capture_output=True, check=False).stderr:
        return None
    return Path(found)


def root_file_system(program: Path) -> bytes:
    """Return a tar archive with busybox under the names of all its programs, and two users."""
    names = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("root", 0o700), ("tmp", 0o1777), ("home/agent", 0o755)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            folder.uid = folder.gid = 1000 if name == "home/agent" else 0
            archive.addfile(folder)
        for name, content, mode in (
            ("bin/busybox", program.read_bytes(), 0o755),
            ("etc/passwd", _USERS.encode(), 0o644),
        ):
            file = tarfile.TarInfo(name)
            file.size, file.mode = len(content), mode
            archive.addfile(file, io.BytesIO(content))
        for name in names:
            if name != "busybox":
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                archive.addfile(link)
    return written.getvalue()


async def import_image(program: Path) -> str:
    """Put the image on the engine, and return the engine's address.

    Raises:
        SandboxFailure: there is no engine.
    """
    engine = Engine(find_address(), 60, 60)
    try:
        with engine.request("the image of the tests", FailureKind.IMAGE):
            await engine.client.version()
            with suppress(DockerError):
                await engine.client.images.inspect(IMAGE)
                return engine.address
            name, tag = IMAGE.split(":")
            url = f"{engine.client.docker_host}/{engine.client.api_version}/images/create"
            headers = {"Content-Type": "application/x-tar"}
            parameters = {"fromSrc": "-", "repo": name, "tag": tag}
            async with engine.client.session.post(
                url, params=parameters, data=io.BytesIO(root_file_system(program)), headers=headers
            ) as answer:
                answer.raise_for_status()
                await answer.read()
    finally:
        await engine.close()
    return engine.address


def problem() -> str:
    """Return why there are no tests on an engine; empty if there are."""
    try:
        find_address()
    except SandboxFailure as failure:
        return str(failure)
    return "" if busybox() else "busybox is not on the PATH, linked statically: install Debian's busybox-static"
