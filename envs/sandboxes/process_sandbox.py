"""A sandbox of the provider `process`, as its worker sees it: requests to the sandbox's process 1.

Each request has a socket of its own, which the worker passes to `envs.sandboxes.launcher` with the file that the
request reads or writes. A worker that closes it withdraws the request, and a command is killed then. A command with an
id is never withdrawn: its result may still be asked for.
"""

import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import Process, TaskGroup, UNIXSocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from envs.contract import ToolError
from envs.sandboxes.bubblewrap import WORKDIR
from envs.sandboxes.contract import (
    DEFAULT_MAX_BYTES,
    ChangedFile,
    ExecResult,
    FailureKind,
    Sandbox,
    SandboxEndedError,
    SandboxFailure,
    SandboxSpec,
)
from envs.sandboxes.launcher import MAX_LIFE_CODE

_MAX_HEAD_BYTES: Final = 64 << 20
_END_TIMEOUT_S: Final = 5.0
_KILLED: Final = 137
_KEPT_RESULTS: Final = 64
USERS: Final = ("", "nobody", "65534")
"""As whom commands run, by the names that a spec may have for it."""
_Files = list[tuple[str, str, int, int]]


class _Call:
    """A command with an id: its result, once it has one."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.result: ExecResult | None = None
        self.error: Exception | None = None


class ProcessSandbox(Sandbox):
    """A sandbox of this process; see `Sandbox`.

    Args:
        name: unique on this machine.
        spec: what it was made of.
        control: socket by which its process 1 gets requests.
        process: its `bwrap`, which ends when all processes of the sandbox have ended.
        tasks: in which commands with an id run.
        call_timeout_s: of each request, in addition to a command's own deadline.
    """

    def __init__(
        self,
        name: str,
        spec: SandboxSpec,
        control: socket.socket,
        process: Process,
        tasks: TaskGroup,
        call_timeout_s: float,
    ) -> None:
        self.name = name
        self.spec = spec
        self._control = control
        self._process = process
        self._tasks = tasks
        self._call_timeout_s = call_timeout_s
        self.snapshots: dict[str, IO[bytes]] = {}
        """Archives of its files, by the name that a spec's `image` may have. They have no path."""
        self._calls: dict[str, _Call] = {}

    async def begin(self, archive: IO[bytes] | None, timeout_s: float) -> None:
        """Wait until process 1 answers and has restored a snapshot, if there is one.

        Raises:
            SandboxFailure: it does not.
        """
        if archive is not None:
            archive.seek(0)
        request = {"do": "begin", "workdir": self.spec.workdir or WORKDIR}
        descriptor = None if archive is None else archive.fileno()
        answer, _ = await self._ask(request, descriptor, timeout_s)
        if "error" in answer:
            raise SandboxFailure(FailureKind.CREATE, f"sandbox {self.name} cannot begin: {answer['error']}")

    async def close(self) -> None:
        """Let go of the sandbox: without its control socket it ends."""
        self._control.close()
        for archive in self.snapshots.values():
            await to_thread.run_sync(archive.close)

    async def exec(  # noqa: D102
        self,
        command: Sequence[str],
        *,
        id: str = "",  # noqa: A002
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        user: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> ExecResult:
        if user not in USERS:
            raise SandboxFailure(FailureKind.CREATE, f"sandboxes of `process` have one user, nobody; not {user!r}")
        request = {
            "do": "exec",
            "command": list(command),
            "timeout_s": timeout_s,
            "cwd": cwd or self.spec.workdir or WORKDIR,
            "env": dict(env),
            "max_bytes": max_bytes,
        }
        if not id:
            return await self._exec(request)
        call = self._calls.get(id)
        if call is None:
            call = self._calls[id] = _Call()
            self._tasks.start_soon(self._run_call, call, request)
        await call.done.wait()  # `_run_call` has a deadline
        if call.error is not None:
            raise call.error
        if call.result is None:
            raise SandboxFailure(
                FailureKind.LOST, f"the result of call {id} in sandbox {self.name} is not kept any more"
            )
        return call.result

    async def _run_call(self, call: _Call, request: dict[str, Any]) -> None:
        """Run a command with an id to its end, even if nobody waits for it."""
        try:
            call.result = await self._exec(request)
        except Exception as error:  # noqa: BLE001  (raised where the result is asked for)
            call.error = error
        finally:
            call.done.set()
        ended = [each for each in self._calls.values() if each.result is not None]
        for each in ended[:-_KEPT_RESULTS]:
            each.result = None

    async def _exec(self, request: dict[str, Any]) -> ExecResult:
        answer, content = await self._ask(request, None, request["timeout_s"] + self._call_timeout_s)
        cut = answer["sizes"][0]
        return ExecResult(
            code=answer["code"],
            ended=answer["ended"],
            stdout=content[:cut],
            stderr=content[cut:],
            truncated=answer["truncated"],
            seconds=answer["seconds"],
        )

    async def read(self, path: str, max_bytes: int) -> bytes:  # noqa: D102
        answer, content = await self._ask({"do": "read", "path": path, "max_bytes": max_bytes})
        if answer.get("kind") == "missing":
            raise FileNotFoundError(f"sandbox {self.name} has no file {path}")
        if "error" in answer:
            raise ValueError(f"{path} in sandbox {self.name} cannot be read: {answer['error']}")
        return content

    async def write(self, files: Mapping[str, bytes | Path], *, user: str = "") -> None:  # noqa: D102
        if user not in USERS:
            raise SandboxFailure(FailureKind.CREATE, f"sandboxes of `process` have one user, nobody; not {user!r}")
        entries, source = await to_thread.run_sync(_collect, files)
        with source:
            answer, _ = await self._ask({"do": "write", "files": entries}, source.fileno())
        if "error" in answer:  # no room, or a folder of the policy is in the way
            raise ToolError(f"the files cannot be written: {answer['error']}")

    async def changed_files(self) -> list[ChangedFile]:  # noqa: D102
        _, content = await self._ask({"do": "changed"})
        return [ChangedFile(path, kind) for path, kind in msgspec.json.decode(content)]

    async def snapshot(self) -> str:  # noqa: D102
        target = await to_thread.run_sync(tempfile.TemporaryFile)
        answer, _ = await self._ask({"do": "snapshot"}, target.fileno())
        if "error" in answer:
            target.close()
            raise SandboxFailure(FailureKind.FULL, f"no snapshot of sandbox {self.name}: {answer['error']}")
        name = f"{self.name}-{len(self.snapshots) + 1}"
        self.snapshots[name] = target
        return name

    async def _ask(
        self, request: dict[str, Any], file: int | None = None, timeout_s: float | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request to process 1, with a file that it may read or write; returns its answer and its content.

        Raises:
            SandboxFailure: the sandbox is gone, or gives no answer.
            SandboxEndedError: it has ended by itself.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"r"], [theirs.fileno(), *([] if file is None else [file])])
        except OSError as error:
            ours.close()
            raise await self._ending() from error
        stream = await UNIXSocketStream.from_socket(ours)
        with anyio.CancelScope() as scope:
            scope.deadline = anyio.current_time() + (self._call_timeout_s if timeout_s is None else timeout_s)
            try:
                return await _answer(stream, request)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, ValueError) as error:
                raise await self._ending() from error
            finally:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()
        raise SandboxFailure(FailureKind.UNREACHABLE, f"sandbox {self.name} on this machine gave no answer in time")

    async def _ending(self) -> Exception:
        """Return why the sandbox answers no more: by itself, the policy's affair, or by a hand from outside."""
        with anyio.move_on_after(_END_TIMEOUT_S):
            await self._process.wait()
        code = self._process.returncode
        if code is None or code < 0 or code == _KILLED or self._control.fileno() < 0:
            return SandboxFailure(
                FailureKind.LOST, f"sandbox {self.name} on this machine is gone: it was removed, or killed from outside"
            )
        reason = f"it had lived for {self.spec.max_life_s:g} s" if code == MAX_LIFE_CODE else "its first process failed"
        return SandboxEndedError(f"The sandbox has ended: {reason}.")


async def _answer(stream: UNIXSocketStream, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    data = msgspec.json.encode(request)
    await stream.send(len(data).to_bytes(4, "little") + data)
    received = BufferedByteReceiveStream(stream)
    size = int.from_bytes(await received.receive_exactly(4), "little")
    if size > _MAX_HEAD_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    answer = msgspec.json.decode(await received.receive_exactly(size), type=dict[str, Any])
    return answer, await received.receive_exactly(answer["size"]) if answer["size"] else b""


def _collect(files: Mapping[str, bytes | Path]) -> tuple[_Files, IO[bytes]]:
    """Return paths with kinds, modes and sizes, and a file with the contents, one after the other."""
    entries: _Files = []
    source = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
    for path, content in files.items():
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is no absolute path")
        if isinstance(content, bytes):
            entries.append((path, "file", 0o644, source.write(content)))
            continue
        for found in [content, *(sorted(content.rglob("*")) if content.is_dir() else [])]:
            inside = path if found == content else f"{path}/{found.relative_to(content)}"
            if found.is_dir():
                entries.append((inside, "folder", 0o755, 0))
            elif found.is_file():
                entries.append((inside, "file", found.stat().st_mode & 0o777, source.write(found.read_bytes())))
    source.flush()
    source.seek(0)
    return entries, source
