"""An engine that answers as a test says: the few routes of Docker's API that a sandbox uses, over a Unix socket."""

import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import SocketStream

RUNNING = {
    "State": {"Status": "running", "Running": True, "OOMKilled": False, "ExitCode": 0},
    "HostConfig": {"CpuShares": 0},
    "Config": {"WorkingDir": ""},
}


def state(status: str, *, code: int = 0, oom: bool = False, shares: int = 0) -> dict[str, Any]:
    return {
        "State": {"Status": status, "Running": status == "running", "OOMKilled": oom, "ExitCode": code},
        "HostConfig": {"CpuShares": shares},
        "Config": {"WorkingDir": ""},
    }


@dataclass
class Answer:
    """What the engine answers to one request."""

    status: int = 200
    body: Any = None
    after_s: float = 0.0
    stream: tuple[bytes, bytes] | None = None
    """Output of a command, as an upgraded connection; it ends with it, whole or not."""

    def encode(self) -> bytes:
        if self.stream is not None:
            frames = b"".join(
                struct.pack(">BxxxL", number, len(data)) + data for number, data in enumerate(self.stream, 1) if data
            )
            head = "HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
            return f"{head}Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n".encode() + frames
        text = json.dumps(self.body).encode() if self.body is not None else b""
        head = f"HTTP/1.1 {self.status} -\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        return f"{head}Connection: close\r\n\r\n".encode() + text


def error(status: int, message: str) -> Answer:
    return Answer(status, {"message": message})


@dataclass
class FaultyEngine:
    """Answers each route with the next of its answers; the last one is repeated."""

    address: str
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    """Each request: `METHOD path` without its version and its query, and its body."""

    def on(self, route: str, *answers: Answer) -> None:
        self.answers[route] = list(answers)

    def count(self, route: str) -> int:
        return sum(made == route for made, _ in self.requests)

    def bodies(self, route: str) -> list[Any]:
        return [body for made, body in self.requests if made == route]

    async def handle(self, client: SocketStream) -> None:
        async with client:
            received = b""
            while b"\r\n\r\n" not in received:
                received += await client.receive()
            head, _, body = received.partition(b"\r\n\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
            while len(body) < int(headers.get("content-length", 0)):
                body += await client.receive()
            method, target = head.decode().split(" ")[:2]
            path = target.split("?")[0].removeprefix("/v1.41").lstrip("/")
            route = f"{method} {path}"
            self.requests.append((route, json.loads(body) if body.startswith(b"{") else body))
            waiting = self.answers.get(route) or [error(404, f"no answer for {route}")]
            answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            await anyio.sleep(answer.after_s)
            await client.send(answer.encode())


@asynccontextmanager
async def faulty_engine(folder: Path) -> AsyncIterator[FaultyEngine]:
    socket = folder / "docker.sock"
    engine = FaultyEngine(f"unix://{socket}")
    engine.on("GET version", Answer(body={"ApiVersion": "1.41", "Components": [{"Name": "Engine"}]}))
    engine.on("GET images/box/json", Answer(body={"Id": "sha256:1", "Config": {"WorkingDir": "/work"}}))
    engine.on("GET images/json", Answer(body=[]))

    async def handle(client: SocketStream) -> None:
        try:
            await engine.handle(client)
        except (anyio.BrokenResourceError, anyio.EndOfStream):
            return

    async with await anyio.create_unix_listener(socket) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield engine
        tasks.cancel_scope.cancel()


def reply(how: str = "exited", code: int = 0, out: bytes = b"", err: bytes = b"") -> Answer:
    """What a runner replies."""
    header = f"{how} {code} 1.00 2.50 0 {len(out)} {len(err)}\n".encode()
    return Answer(stream=(header + out, err))
