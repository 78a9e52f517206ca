"""Imports two small root file systems of this machine as images of an engine, so that no registry is needed.

::

    python make_images.py            # DOCKER_HOST says which engine; --engine podman for the other command

`penstock-tasks:busybox` has Debian's `busybox-static`; `penstock-tasks:python` has this interpreter, too.
"""

import argparse
import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

USERS = """root:x:0:0:root:/root:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/sh
worker:x:1000:1000:worker:/home/worker:/bin/sh
"""
GROUPS = "root:x:0:\nnogroup:x:65534:\nworker:x:1000:\n"
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "__pycache__",
    "tkinter",
    "turtledemo",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="docker", help="the command: docker or podman")
    engine = parser.parse_args().engine
    busybox = shutil.which("busybox")
    if busybox is None:
        sys.exit("busybox is not installed: apt-get install busybox-static")
    import_image(engine, "penstock-tasks:busybox", busybox, with_python=False)
    import_image(engine, "penstock-tasks:python", busybox, with_python=True)


def import_image(engine: str, name: str, busybox: str, *, with_python: bool) -> None:
    """Import a root file system under a name."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        add_base(archive, busybox)
        if with_python:
            add_python(archive)
    command = [engine, "import", "--change", "WORKDIR /work", "-", name]
    subprocess.run(command, input=content.getvalue(), check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    print(f"{name}: {len(content.getvalue()) >> 20} MB")


def add_base(archive: tarfile.TarFile, busybox: str) -> None:
    """Add folders, users, busybox, and a link for each of its programs."""
    for folder, mode, owner in (
        *(
            (folder, 0o755, 0)
            for folder in ("bin", "etc", "root", "var", "home", "usr", "usr/local", "usr/local/bin", "work")
        ),
        ("tmp", 0o1777, 0),
        ("home/worker", 0o755, 1000),
    ):
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, owner, owner
        archive.addfile(entry)
    for path, text in (("etc/passwd", USERS), ("etc/group", GROUPS)):
        add_bytes(archive, path, text.encode(), 0o644)
    add_bytes(archive, "bin/busybox", Path(busybox).read_bytes(), 0o755)
    programs = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)  # noqa: S603
    for program in sorted({*programs.stdout.split()} - {"busybox"}):
        entry = tarfile.TarInfo(f"bin/{program}")
        entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
        archive.addfile(entry)


def add_python(archive: tarfile.TarFile) -> None:
    """Add this interpreter, its library without packages, and the shared libraries that both load."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    executable = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    add_bytes(archive, f"usr/local/bin/{version}", executable.read_bytes(), 0o755)
    entry = tarfile.TarInfo("usr/local/bin/python3")
    entry.type, entry.linkname = tarfile.SYMTYPE, version
    archive.addfile(entry)
    binaries = [executable]
    for file in sorted(library.rglob("*")):
        relative = file.relative_to(library)
        if file.is_file() and not LEFT_OUT & {*relative.parts} and not relative.parts[0].startswith("config-"):
            add_bytes(archive, f"usr/local/lib/{version}/{relative}", file.read_bytes(), 0o644)
            binaries += [file] if file.suffix == ".so" else []
    for path in sorted({path for binary in binaries for path in shared_libraries(binary)}):
        add_bytes(archive, path.lstrip("/"), Path(path).read_bytes(), 0o755)


def shared_libraries(binary: Path) -> Iterator[str]:
    """Yield the shared libraries that a binary loads, and its loader."""
    listed = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False)  # noqa: S603, S607
    for line in listed.stdout.splitlines():
        words = line.replace("=>", " ").split()
        yield from [word for word in words if word.startswith("/")][-1:]


def add_bytes(archive: tarfile.TarFile, path: str, content: bytes, mode: int) -> None:
    """Add a file of root."""
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    main()
