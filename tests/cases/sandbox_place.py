"""A place of sandboxes for tests: a process of its own, with the faults of real ones, and a provider that reaches it.

Its sandboxes are entries in a dictionary, and commands do little; but it outlives the workers that are killed, creates
what a dead client has asked for, loses answers, and refuses removals. Each request is a line of JSON on a connection of
its own: `python tests/cases/sandbox_place.py SOCKET`.
"""

import json
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import Popen
from types import MappingProxyType
from typing import Any

import anyio
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from envs.sandboxes.contract import (
    BEGUN_LABEL,
    DEFAULT_MAX_BYTES,
    RUN_LABEL,
    ChangedFile,
    ExecResult,
    FailureKind,
    ListedSandbox,
    Network,
    Sandbox,
    SandboxEndedError,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
)

_MAX_LINE = 1 << 20


class Place:
    """The state of the place. Faults are probabilities, or seconds, that a test sets."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.created = self.removed = 0
        self.most = 0
        self.faults: dict[str, float] = {}
        self.random = random.Random(7)

    def happens(self, fault: str) -> bool:
        return self.random.random() < self.faults.get(fault, 0)

    async def create(self, name: str, labels: dict[str, str], pid: int) -> dict[str, Any]:
        if self.happens("refuse_create"):
            return {"failure": "create"}
        if self.happens("full"):
            return {"failure": "full"}
        await anyio.sleep(self.faults.get("create_s", 0) * self.random.random())
        if name not in self.sandboxes:
            self.created += 1
            self.sandboxes[name] = {
                "labels": labels,
                "files": {},
                "fence": 1,
                "execs": {},
                "running": {},
                "ended": False,
                "pid": pid,
            }
            self.most = max(self.most, len(self.sandboxes))
        return {}

    async def remove(self, name: str) -> dict[str, Any]:
        await anyio.sleep(self.faults.get("remove_s", 0) * self.random.random())
        if self.happens("refuse_removal"):
            return {"failure": "unreachable"}
        found = self.sandboxes.pop(name, None)
        self.removed += found is not None
        return {"found": found is not None}

    async def exec(self, name: str, command: list[str], call: str, fence: int) -> dict[str, Any]:
        found = self.sandboxes.get(name)
        if found is None:
            return {"failure": "lost"}
        if fence < found["fence"]:
            return {"failure": "fenced"}
        if found["ended"]:
            return {"ended": True}
        if call in found["running"]:
            await found["running"][call].wait()
        if call not in found["execs"]:
            running = found["running"][call] = anyio.Event()
            if command[0] == "append":
                await anyio.sleep(float(command[3]))
                found["files"][command[1]] = found["files"].get(command[1], "") + command[2]
            elif command[0] == "sleep":
                await anyio.sleep(float(command[1]))
            elif command[0] == "write":
                found["files"][command[1]] = command[2]
            elif command[0] == "end":
                found["ended"] = True
            found["execs"][call] = " ".join(command[1:])
            running.set()
            del found["running"][call]
        return {"stdout": found["execs"][call]}

    async def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request.get("name", "")
        match request["do"]:
            case "create":
                return await self.create(name, request["labels"], request["pid"])
            case "remove":
                return await self.remove(name)
            case "exec":
                return await self.exec(name, request["command"], request["id"], request["fence"])
            case "attach":
                found = self.sandboxes.get(name)
                if found is None:
                    return {"failure": "lost"}
                found["fence"] = max(found["fence"], request["fence"])
                return {}
            case "files":
                found = self.sandboxes.get(name)
                return {"failure": "lost"} if found is None else {"files": found["files"]}
            case "list":
                return {"sandboxes": {name: found["labels"] for name, found in self.sandboxes.items()}}
            case "creators":
                return {"creators": {name: found["pid"] for name, found in self.sandboxes.items()}}
            case "faults":
                self.faults = request["faults"]
            case "counts":
                return {"created": self.created, "removed": self.removed, "most": self.most}
        return {}

    async def serve(self, stream: SocketStream) -> None:
        async with stream:
            try:
                line = await BufferedByteReceiveStream(stream).receive_until(b"\n", _MAX_LINE)
                request = json.loads(line)
                answer = await self.handle(request)  # goes on although the client may be dead by now
                if request["do"] == "faults" or not self.happens("lose_reply"):
                    await stream.send(json.dumps(answer).encode() + b"\n")
            except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


async def main(path: str) -> None:
    """Serve until killed."""
    place = Place()
    listener = await anyio.create_unix_listener(path)
    await listener.serve(place.serve)


class PlaceProvider(SandboxProvider):
    """Reaches the place at `sandboxes.address`, the path of its socket."""

    has_images = False
    survives_worker = True
    networks = frozenset((Network.OFF,))
    isolates = frozenset(("files",))

    async def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, and return the answer."""
        limit_s = self.options.create_timeout_s if request["do"] == "create" else self.options.call_timeout_s
        try:
            with anyio.fail_after(limit_s):
                async with await anyio.connect_unix(self.options.address) as stream:
                    await stream.send(json.dumps(request).encode() + b"\n")
                    answer = json.loads(await BufferedByteReceiveStream(stream).receive_until(b"\n", _MAX_LINE))
        except (OSError, TimeoutError, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
            kind = FailureKind.CREATE if request["do"] == "create" else FailureKind.UNREACHABLE
            raise SandboxFailure(kind, f"{self.options.address} gave no answer: {error!r}") from error
        if "failure" in answer:
            raise SandboxFailure(FailureKind(answer["failure"]), f"sandbox {request.get('name')}")
        return dict(answer)

    async def place(self) -> str:
        return Path(self.options.address).name

    async def resolve(self, image: str) -> str:
        return image

    async def create(self, name: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Sandbox:
        await self.ask(do="create", name=name, labels=dict(labels), pid=os.getpid())
        return PlaceSandbox(self, name, spec, 1)

    async def attach(self, name: str, spec: SandboxSpec, fence: int) -> Sandbox:
        await self.ask(do="attach", name=name, fence=fence)
        return PlaceSandbox(self, name, spec, fence)

    async def remove(self, name: str) -> bool:
        return bool((await self.ask(do="remove", name=name))["found"])

    async def list(self, run_id: str = "") -> list[ListedSandbox]:
        found = (await self.ask(do="list"))["sandboxes"]
        return [
            ListedSandbox(
                name=name, run_id=labels[RUN_LABEL], begun=float(labels.get(BEGUN_LABEL, 0.0)), state="running"
            )
            for name, labels in found.items()
            if run_id in ("", labels[RUN_LABEL])
        ]


class PlaceSandbox(Sandbox):
    """A sandbox of the place."""

    def __init__(self, provider: PlaceProvider, name: str, spec: SandboxSpec, fence: int) -> None:
        self.name, self.spec = name, spec
        self._provider, self._fence = provider, fence

    async def exec(
        self,
        command: Sequence[str],
        *,
        id: str = "",  # noqa: A002  (as the contract has it)
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        user: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> ExecResult:
        call = id or f"{time.monotonic_ns()}"
        answer = await self._provider.ask(do="exec", name=self.name, command=list(command), id=call, fence=self._fence)
        if answer.get("ended"):
            raise SandboxEndedError("the sandbox has ended")
        return ExecResult(code=0, stdout=answer["stdout"].encode())

    async def read(self, path: str, max_bytes: int) -> bytes:
        files = (await self._provider.ask(do="files", name=self.name))["files"]
        if path not in files:
            raise FileNotFoundError(path)
        return files[path].encode()[:max_bytes]

    async def write(self, files: Mapping[str, bytes | Path], *, user: str = "") -> None:
        for path, content in files.items():
            text = content.decode() if isinstance(content, bytes) else await anyio.Path(content).read_text()
            await self.exec(["write", path, text], timeout_s=1)

    async def changed_files(self) -> list[ChangedFile]:
        return []

    async def snapshot(self) -> str:
        return self.name


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


@contextmanager
def serve_place(folder: Path) -> Iterator[Path]:
    """Start a place as a process; yields the path of its socket."""
    path = folder / "place.sock"
    process = Popen([sys.executable, __file__, str(path)])
    try:
        deadline = time.monotonic() + 30
        while not _answers(path):
            assert time.monotonic() < deadline, "the place did not start"
            time.sleep(0.02)
        yield path
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def reached(path: Path) -> AsyncIterator[PlaceProvider]:
    """Yield a provider, to look at the place and to set its faults."""
    from envs.sandboxes.contract import ProviderOptions

    async with PlaceProvider(ProviderOptions(address=str(path), create_timeout_s=30, call_timeout_s=30)) as provider:
        yield provider


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
