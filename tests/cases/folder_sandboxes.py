"""A provider of the tests' own with images: each sandbox is a folder, which bubblewrap makes the root of a command.

Processes end with their command, so nothing is left behind. What happens to a sandbox from outside is set by the test.
"""

import filecmp
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
from anyio import to_thread

from envs.sandboxes.contract import (
    ChangedFile,
    EpisodeSandboxes,
    ExecResult,
    FailureKind,
    ListedSandbox,
    Network,
    ProviderOptions,
    Sandbox,
    SandboxEndedError,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
)

HOST_FOLDERS = ("usr",)
LINKS = ("bin", "sbin", "lib", "lib64")


class FolderSandbox(Sandbox):
    """A folder, with the host's programs."""

    def __init__(self, provider: "FolderProvider", name: str, spec: SandboxSpec) -> None:
        self.provider, self.name, self.spec = provider, name, spec
        self.root = provider.folder / "sandboxes" / name
        self.commands: list[tuple[str, ...]] = []

    def check(self) -> None:
        if self.name in self.provider.lost:
            raise SandboxFailure(FailureKind.LOST, f"{self.name} is gone")

    async def exec(
        self,
        command,
        *,
        id="",  # noqa: A002
        timeout_s,
        cwd="",
        env=MappingProxyType({}),
        user="",
        max_bytes=1 << 20,
    ) -> ExecResult:
        self.check()
        if self.name in self.provider.ended:
            raise SandboxEndedError("the sandbox ended")
        self.commands.append(tuple(command))
        if hook := self.provider.on_exec:
            await to_thread.run_sync(hook, self, tuple(command))
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", **self.spec.env, **env}
        uid = user or self.spec.user or "0"
        line = [
            "bwrap",
            "--unshare-all",
            "--die-with-parent",
            "--uid",
            uid,
            "--gid",
            uid,
            "--bind",
            str(self.root),
            "/",
        ]
        for folder in HOST_FOLDERS:
            line += ["--ro-bind", f"/{folder}", f"/{folder}"]
        for name, value in variables.items():
            line += ["--setenv", name, value]
        line += ["--proc", "/proc", "--dev", "/dev", "--chdir", cwd or self.spec.workdir or "/", *command]
        begun = anyio.current_time()
        process = await anyio.open_process(
            line, stdin=subprocess.DEVNULL, start_new_session=True, env={"PATH": "/usr/bin:/bin"}
        )
        out, err = bytearray(), bytearray()

        async def collect(stream: Any, into: bytearray) -> None:
            async for part in stream:
                into.extend(part)

        ended = "timeout"
        try:
            with anyio.move_on_after(timeout_s):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(collect, process.stdout, out)
                    tasks.start_soon(collect, process.stderr, err)
                await process.wait()
                ended = "exited"
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                await process.aclose()
        self.check()
        if hook := self.provider.after_exec:
            await to_thread.run_sync(hook, self, tuple(command))
        code = process.returncode if ended == "exited" else 137
        return ExecResult(
            code=code or 0,
            ended=ended,
            stdout=bytes(out[:max_bytes]),
            stderr=bytes(err[:max_bytes]),
            truncated=len(out) > max_bytes,
            seconds=anyio.current_time() - begun,
        )

    async def read(self, path: str, max_bytes: int) -> bytes:
        self.check()

        def read() -> bytes:
            place = self.root
            for part in Path(path).parts[1:]:
                place /= part
                if place.is_symlink():
                    raise ValueError(f"{path} is a link")
            if not place.exists():
                raise FileNotFoundError(path)
            if not place.is_file() or place.stat().st_size > max_bytes:
                raise ValueError(f"{path} is no regular file of at most {max_bytes} bytes")
            return place.read_bytes()

        return await to_thread.run_sync(read)

    async def write(self, files: Mapping[str, bytes | Path], *, user: str = "") -> None:
        self.check()

        def write() -> None:
            for name, content in files.items():
                target = self.root / name.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, bytes):
                    target.write_bytes(content)
                else:
                    subprocess.run(["cp", "-a", "-T", str(content), str(target)], check=True)

        await to_thread.run_sync(write)

    async def changed_files(self) -> list[ChangedFile]:
        self.check()
        return await to_thread.run_sync(self.provider.compare, self.provider.folder / self.spec.image, self.root)

    async def snapshot(self) -> str:
        self.check()
        image = f"images/snapshot-{self.name}-{len(self.provider.snapshots)}"
        self.provider.snapshots.append(image)
        await to_thread.run_sync(copy_folder, self.root, self.provider.folder / image)
        return image


def copy_folder(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", "-T", str(source), str(target)], check=True)


class FolderProvider(SandboxProvider):
    """Images and sandboxes below a folder.

    Attributes:
        lost: names of sandboxes that are gone.
        ended: names of sandboxes that ended by themselves.
        on_create: called with the spec of each new sandbox; may raise.
        on_exec: called before each command.
        after_exec: called after each command.
    """

    has_images = True
    survives_worker = True
    networks = frozenset((Network.OFF,))
    isolates = frozenset(("files", "network", "processes"))

    def __init__(self, folder: Path) -> None:
        super().__init__(ProviderOptions())
        self.folder = folder
        self.lost: set[str] = set()
        self.ended: set[str] = set()
        self.snapshots: list[str] = []
        self.on_create: Any = None
        self.on_exec: Any = None
        self.after_exec: Any = None

    def make_image(self, name: str, files: Mapping[str, str] = MappingProxyType({})) -> str:
        """Make an image with the host's programs."""
        root = self.folder / "images" / name
        for part in ("tmp", "work", "etc", "root", "logs", "var"):
            (root / part).mkdir(parents=True)
        (root / "usr").mkdir()
        for link in LINKS:
            if Path(f"/{link}").is_symlink():
                (root / link).symlink_to(f"usr/{link}")
        for path, text in files.items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return name

    def compare(self, image: Path, root: Path) -> list[ChangedFile]:
        before = {path.relative_to(image): path for path in image.rglob("*")}
        after = {path.relative_to(root): path for path in root.rglob("*")}
        changes = [ChangedFile(f"/{path}", "added") for path in after.keys() - before.keys()]
        changes += [ChangedFile(f"/{path}", "deleted") for path in before.keys() - after.keys()]
        changes += [
            ChangedFile(f"/{path}", "modified")
            for path in before.keys() & after.keys()
            if before[path].is_file() and not (after[path].is_file() and filecmp.cmp(before[path], after[path], False))
        ]
        return sorted(changes, key=lambda change: change.path)

    async def place(self) -> str:
        return str(self.folder)

    async def resolve(self, image: str) -> str:
        if not await to_thread.run_sync((self.folder / "images" / image).is_dir):
            raise SandboxFailure(FailureKind.IMAGE, f"there is no image {image}")
        return f"images/{image}"

    async def create(self, name: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Sandbox:
        if self.on_create:
            self.on_create(spec)
        sandbox = FolderSandbox(self, name, spec)
        await to_thread.run_sync(copy_folder, self.folder / spec.image, sandbox.root)
        return sandbox

    async def attach(self, name: str, spec: SandboxSpec, fence: int) -> Sandbox:
        return FolderSandbox(self, name, spec)

    async def remove(self, name: str) -> bool:
        folder = self.folder / "sandboxes" / name
        was_there = await to_thread.run_sync(folder.exists)
        await to_thread.run_sync(lambda: subprocess.run(["rm", "-rf", str(folder)], check=True))
        return was_there

    async def list(self, run_id: str = "") -> list[ListedSandbox]:
        return [
            ListedSandbox(name=path.name, run_id="", begun=0.0, state="running")
            for path in sorted((self.folder / "sandboxes").glob("*"))
        ]


class DirectSandboxes(EpisodeSandboxes):
    """The sandboxes of an episode, without leases."""

    def __init__(self, provider: SandboxProvider, labels: Mapping[str, str] = MappingProxyType({})) -> None:
        self.provider = provider
        self.labels = dict(labels)
        self.opened: list[tuple[str, Sandbox]] = []
        self.open_now: list[Sandbox] = []

    async def open(self, spec: SandboxSpec, *, purpose: str) -> Sandbox:
        sandbox = await self.provider.create(f"penstock-{os.urandom(6).hex()}", spec, self.labels)
        self.opened.append((purpose, sandbox))
        self.open_now.append(sandbox)
        return sandbox

    async def close(self, sandbox: Sandbox) -> None:
        self.open_now.remove(sandbox)
        await self.provider.remove(sandbox.name)

    def purposes(self) -> list[str]:
        """Return what the sandboxes were opened for, in order."""
        return [purpose for purpose, _ in self.opened]


@asynccontextmanager
async def direct_sandboxes(
    provider: SandboxProvider, labels: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[DirectSandboxes]:
    """Yield the sandboxes of an episode, which are removed at its end."""
    sandboxes = DirectSandboxes(provider, labels)
    try:
        yield sandboxes
    finally:
        with anyio.CancelScope(shield=True):
            for sandbox in list(sandboxes.open_now):
                await sandboxes.close(sandbox)
