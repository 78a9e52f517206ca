"""The provider `process`: sandboxes of bubblewrap on the worker's own machine. They have no images, and end with it.

Each sandbox is one `bwrap` with `envs.sandboxes.launcher` as its process 1. Its files lie in memory, so that a kill
leaves none. Sandboxes of root run as the user nobody; where nobody can read a Python, there are none.
"""

import functools
import importlib.resources
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Final, Self

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import Process

from envs.sandboxes import launcher, launcher_files
from envs.sandboxes.bubblewrap import (
    WORKDIR,
    BubblewrapSpec,
    Launch,
    becomes_nobody,
    interpreter_paths,
    launch,
    sandbox_problem,
)
from envs.sandboxes.contract import (
    BEGUN_LABEL,
    RUN_LABEL,
    FailureKind,
    ListedSandbox,
    Network,
    ProviderOptions,
    Sandbox,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
)
from envs.sandboxes.process_registry import ProcessEntry, ProcessRegistry, kill_and_wait, only_child, start_time
from envs.sandboxes.process_sandbox import USERS, ProcessSandbox

_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_TMP: Final = "/tmp"  # noqa: S108  (of a sandbox)
_SHOWN_AT: Final = "/penstock"
_PROGRAM: Final = f"import sys; sys.path.insert(0, {_SHOWN_AT!r}); from envs.sandboxes.launcher import main; main()"
_SYSTEM_PYTHON: Final = "/usr/bin/python3"
_OTHERS: Final = "set sandboxes.provider to `docker` or `kubernetes`"
_MAX_FILES: Final = 250_000
_SHM_BYTES: Final = 64 << 20
_MAX_ERROR_BYTES: Final = 2000
_END_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class _Living:
    """A sandbox of this process."""

    sandbox: ProcessSandbox
    process: Process
    """Its `bwrap`, which ends when all processes of the sandbox have ended."""


class ProcessProvider(SandboxProvider):
    """Makes sandboxes of bubblewrap on this machine; see `SandboxProvider`.

    `ProviderOptions.address` is the folder in which workers note their sandboxes for each other; by default one in the
    folder for temporary files.
    """

    has_images: ClassVar[bool] = False
    survives_worker: ClassVar[bool] = False
    networks: ClassVar[frozenset[Network]] = frozenset({Network.OFF})
    isolates: ClassVar[frozenset[str]] = frozenset({"files", "network", "processes", "memory", "disk", "pids"})

    def __init__(self, options: ProviderOptions) -> None:
        super().__init__(options)
        default = Path(tempfile.gettempdir()) / f"penstock-sandboxes-{os.geteuid()}"
        self._registry = ProcessRegistry(Path(options.address) if options.address else default)
        self._living: dict[str, _Living] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._python = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Look whether this machine makes sandboxes.

        Raises:
            SandboxFailure: it makes none.
        """
        self._python = await to_thread.run_sync(_python_for_sandboxes)
        try:
            await to_thread.run_sync(self._registry.prepare)
        except OSError as error:
            raise SandboxFailure(FailureKind.CREATE, f"no sandboxes of `process`: {error}") from error
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all sandboxes."""
        with anyio.CancelScope(shield=True):
            for name in list(self._living):
                with suppress(SandboxFailure):
                    await self.remove(name)
        self._tasks.cancel_scope.cancel()
        await self._stack.aclose()

    async def place(self) -> str:  # noqa: D102
        return f"process:{platform.node()}"

    async def resolve(self, image: str) -> str:  # noqa: D102
        if image and self._archive(image) is None:
            raise SandboxFailure(
                FailureKind.IMAGE,
                f"sandboxes of `process` have no images, so none named {image!r}: {_OTHERS}",
            )
        return image

    def _archive(self, image: str) -> IO[bytes] | None:
        archives = (living.sandbox.snapshots.get(image) for living in self._living.values())
        return next((archive for archive in archives if archive is not None), None)

    async def create(self, name: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Sandbox:  # noqa: D102
        await self.resolve(spec.image)
        _refuse_what_it_lacks(spec)
        async with self._locks.setdefault(name, anyio.Lock()):
            if name not in self._living:
                with anyio.move_on_after(self.options.create_timeout_s) as scope:
                    self._living[name] = await self._create(name, spec, labels)
                if scope.cancelled_caught:
                    took = f"{self.options.create_timeout_s:g} s"
                    raise SandboxFailure(FailureKind.CREATE, f"sandbox {name} did not start within {took}")
            return self._living[name].sandbox

    async def _create(self, name: str, spec: SandboxSpec, labels: Mapping[str, str]) -> _Living:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with await to_thread.run_sync(tempfile.TemporaryFile) as errors, ExitStack() as undo:
            undo.callback(ours.close)  # the sandbox ends then
            try:
                with anyio.CancelScope(shield=True):  # cancelled half-way, the process would leak
                    process = await self._start(spec, theirs, errors)
                sandbox = ProcessSandbox(name, spec, ours, process, self._tasks, self.options.call_timeout_s)
                async with _ended_on_error(process):
                    await sandbox.begin(self._archive(spec.image), self.options.create_timeout_s)
                    await to_thread.run_sync(self._note, process.pid, name, dict(labels))
            except (OSError, SandboxFailure) as error:
                said = await to_thread.run_sync(_read_end, errors)
                raise SandboxFailure(FailureKind.CREATE, f"sandbox {name} cannot start: {said or error}") from error
            undo.pop_all()
            return _Living(sandbox, process)

    async def _start(self, spec: SandboxSpec, control: socket.socket, errors: IO[bytes]) -> Process:
        with control, await to_thread.run_sync(self._launch, spec, control) as start:
            return await anyio.open_process(
                start.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                **start.options,
            )

    def _launch(self, spec: SandboxSpec, control: socket.socket) -> Launch:
        """Prepare the start of a sandbox; blocks."""
        memory, disk = spec.memory_mb << 20, min(spec.disk_mb, spec.memory_mb) << 20
        passed = os.dup(control.fileno())  # closed with the others of the launch
        order = {
            "socket": passed,
            "folders": [WORKDIR, _TMP],
            "limits": {"RLIMIT_DATA": memory, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_MEMLOCK": 0},
            "pids": spec.pids,
            "memory_bytes": memory,
            "max_files": _MAX_FILES,
            "max_life_s": spec.max_life_s,
            "max_bytes": disk,
            "variables": {"HOME": WORKDIR, "LANG": "C.UTF-8", "PATH": _PATH, **spec.env},
        }
        inside = BubblewrapSpec(
            readable=interpreter_paths(self._python),
            texts=_launcher_texts(),
            folder_bytes=disk // 2,
            shm_bytes=_SHM_BYTES,
            is_process_1=True,
        )
        program = [os.path.realpath(self._python), "-I", "-S", "-c", _PROGRAM, msgspec.json.encode(order).decode()]
        start = launch(program, inside)
        start.options["pass_fds"].append(passed)
        return start

    def _note(self, pid: int, name: str, labels: dict[str, str]) -> None:
        """Note a sandbox for other workers; blocks."""
        first = only_child(pid)
        try:
            begun = float(labels.get(BEGUN_LABEL, ""))
        except ValueError:
            begun = 0.0
        entry = ProcessEntry(
            name=name, run_id=labels.get(RUN_LABEL, ""), begun=begun, pid=first, started=start_time(first)
        )
        self._registry.add(entry)

    async def attach(self, name: str, spec: SandboxSpec, fence: int) -> Sandbox:  # noqa: ARG002, D102
        raise SandboxFailure(
            FailureKind.LOST, f"sandbox {name} belongs to another worker: those of `process` end with it"
        )

    async def remove(self, name: str) -> bool:  # noqa: D102
        living = self._living.pop(name, None)
        self._locks.pop(name, None)
        entry = await to_thread.run_sync(self._registry.find, name)
        if entry is not None:
            if not await to_thread.run_sync(kill_and_wait, entry, self.options.call_timeout_s):
                raise SandboxFailure(FailureKind.UNREACHABLE, f"sandbox {name} (process {entry.pid}) does not end")
            await to_thread.run_sync(self._registry.discard, name)
        if living is not None:
            await living.sandbox.close()
            await _end(living.process)
        return entry is not None

    async def list(self, run_id: str = "") -> list[ListedSandbox]:  # noqa: D102
        entries = await to_thread.run_sync(self._registry.entries)
        return [
            ListedSandbox(name=entry.name, run_id=entry.run_id, begun=entry.begun, state="running")
            for entry in entries
            if run_id in ("", entry.run_id)
        ]


@functools.cache
def _launcher_texts() -> tuple[tuple[str, str], ...]:
    """Return the files of process 1, each with its place in a sandbox."""
    names = [module.__name__ for module in (launcher, launcher_files)]
    texts = [
        importlib.resources.files(launcher.__package__).joinpath(f"{name.rpartition('.')[2]}.py") for name in names
    ]
    return tuple(
        (f"{_SHOWN_AT}/{name.replace('.', '/')}.py", text.read_text()) for name, text in zip(names, texts, strict=True)
    )


def _python_for_sandboxes() -> str:
    """Return a Python that a sandbox can run. Blocks for the first call.

    Raises:
        SandboxFailure: this machine makes no sandboxes.
    """
    if problem := sandbox_problem():
        raise SandboxFailure(
            FailureKind.CREATE,
            f"this machine makes no sandboxes of `process`: {problem}. Install bubblewrap and allow user "
            f"namespaces, or {_OTHERS}",
        )
    for python in (sys.executable, _SYSTEM_PYTHON):
        if Path(python).exists() and (os.geteuid() != 0 or becomes_nobody(interpreter_paths(python))):
            return python
    raise SandboxFailure(
        FailureKind.CREATE,
        f"the worker is root, and the user nobody, as whom sandboxes of `process` run, can read neither "
        f"{sys.executable} nor {_SYSTEM_PYTHON}: run the worker as another user, or install a Python for all users",
    )


def _refuse_what_it_lacks(spec: SandboxSpec) -> None:
    lacking = {
        f"network = {spec.network}": spec.network is not Network.OFF,
        "the network of another sandbox": bool(spec.joins_network_of),
        f"gpus = {spec.gpus}": spec.gpus > 0,
        f"user = {spec.user}": spec.user not in USERS,
        f"workdir = {spec.workdir}": bool(spec.workdir) and not spec.workdir.startswith((f"{WORKDIR}/", f"{_TMP}/")),
    }
    if found := [what for what, is_asked in lacking.items() if is_asked]:
        raise SandboxFailure(
            FailureKind.CREATE,
            f"sandboxes of `process` have no {', no '.join(found)}: {_OTHERS}",
        )


@asynccontextmanager
async def _ended_on_error(process: Process) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            await _end(process)
        raise


async def _end(process: Process) -> None:
    """Wait for the end of a `bwrap` whose sandbox ends, and kill it if that takes long."""
    with anyio.move_on_after(_END_TIMEOUT_S):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()


def _read_end(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
    return errors.read().decode(errors="replace").strip()
