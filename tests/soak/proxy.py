"""A proxy between clients and one server, over TCP or unix sockets, that injects faults by a plan or on command.

>>> async with Proxy(address_of(engine.url)) as proxy:  # doctest: +SKIP
...     client = EngineClient([proxy.url("http")], ...)
...     proxy.plan = at_random(seed, [Fault("rst"), Fault("delay", 0.2)], every=20)
...     proxy.hold()  # from now on nothing passes, in either direction, until `proxy.flow()`

All faults strike answers, which is the hard case: the server has carried out the request, but the client does not know.
A request passes unchanged or not at all. It is never garbled: a garbled command is a different command, and a server
that obeys it does nothing wrong.

Garbling flips the highest bit of a byte. A digit therefore becomes no other digit, in JSON as in RESP: without a
checksum no protocol could detect that. (The payloads have a checksum; so have TCP and TLS.)

The streams are asyncio's, since anyio's cannot reset a connection.
"""

import asyncio
import random
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

import anyio

Kind = Literal["delay", "fin", "rst", "stall", "truncate", "garble"]
"""
``delay``     the answer comes `seconds` late
``fin``       the answer is lost, the connection closed
``rst``       the answer is lost, the connection reset (a unix socket is closed instead)
``stall``     neither the answer nor anything after it comes; the connection stays open
``truncate``  the first half of the answer comes, then the connection is closed
``garble``    the answer comes with one byte altered
"""

Address = Path | tuple[str, int]
"""Path of a unix socket, or host and port."""


_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault on an answer."""

    kind: Kind
    seconds: float = 0.0
    """Length of a delay."""


Plan = Callable[[int, bytes], Fault | None]
"""Maps an answer's number, counted from 0 over all connections, and its bytes to a fault, or None."""


def at_random(seed: int, faults: Sequence[Fault], every: int, *, most: int = 1_000_000, of: bytes = b"") -> Plan:
    """Return a plan that strikes about one answer in `every`, with all faults equally often.

    Args:
        seed: seed of the choice. The order of the answers depends on timing all the same.
        faults: the faults to choose from.
        every: one answer in this many is struck, on average.
        most: largest number of faults.
        of: only answers that contain these bytes.
    """
    chance = random.Random(seed)
    bag: list[Fault] = []
    left = most

    def plan(_number: int, answer: bytes) -> Fault | None:
        nonlocal bag, left
        if not left or of not in answer or chance.random() * every >= 1:
            return None
        left -= 1
        bag = bag or chance.sample(list(faults), len(faults))
        return bag.pop()

    return plan


def first_of(*plans: Plan) -> Plan:
    """Return a plan with the first fault that any of these plans returns."""
    return lambda number, answer: next((fault for plan in plans if (fault := plan(number, answer))), None)


def address_of(url: str) -> Address:
    """Return the address in a URL: `http://`, `redis://`, `unix://`."""
    parts = urlsplit(url)
    return Path(parts.path) if parts.scheme == "unix" else (parts.hostname or "127.0.0.1", parts.port or 0)


class Proxy:
    """Forwards connections for as long as the context is open.

    Args:
        upstream: address of the server; may be set later, before the first client connects.
        at: unix socket to listen on; a free TCP port by default.
        seed: seed of the positions at which answers are garbled.
    """

    def __init__(self, upstream: Address | None = None, *, at: Path | None = None, seed: int = 0) -> None:
        self.upstream = upstream
        self.plan: Plan = lambda _number, _answer: None
        self.struck: Counter[str] = Counter()
        """Faults so far, by kind."""
        self.answers = 0
        self.connections = 0
        self._at = at
        self._port = 0
        self._chance = random.Random(seed)
        self._flowing = anyio.Event()
        self._flowing.set()
        self._clients: set[StreamWriter] = set()
        self._stranded: set[StreamWriter] = set()
        self._stack = AsyncExitStack()

    def url(self, scheme: str) -> str:
        """Return the proxy's URL for clients."""
        return f"unix://{self._at}" if self._at else f"{scheme}://127.0.0.1:{self._port}"

    def hold(self) -> None:
        """Let nothing pass and keep all connections open, as if the network were gone."""
        if self._flowing.is_set():
            self._flowing = anyio.Event()

    def flow(self) -> None:
        """Let everything pass again, including the bytes held back."""
        self._flowing.set()

    def strand(self) -> int:
        """Make all current connections half-open: nothing passes any more, not even their end; new ones work.

        Returns:
            How many these are.
        """
        new = self._clients - self._stranded
        self._stranded |= new
        return len(new)

    def cut(self, kind: Literal["fin", "rst"]) -> None:
        """Close or reset all current connections."""
        for client in self._clients:
            _close(client, kind)

    async def __aenter__(self) -> Self:
        listening = self._stack.enter_context(_listen(self._at))
        self._port = 0 if self._at else listening.getsockname()[1]
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._accept, listening, tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _accept(self, listening: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            client, _ = await asyncio.get_running_loop().sock_accept(listening)
            self.connections += 1
            tasks.start_soon(self._serve, client)

    async def _serve(self, accepted: socket.socket) -> None:
        """Serve one connection until one side closes it."""
        asking, client = await asyncio.open_connection(sock=accepted)
        self._clients.add(client)
        server = None
        try:
            answering, server = await _connect(self.upstream)
            async with anyio.create_task_group() as tasks:

                async def until_closed(pump: Awaitable[None]) -> None:
                    with suppress(OSError):
                        await pump
                    await self._flowing.wait()  # nor does the end of a connection pass while nothing does
                    tasks.cancel_scope.cancel()

                tasks.start_soon(until_closed, self._ask(asking, server, client))
                tasks.start_soon(until_closed, self._answer(answering, client))
        except OSError:  # the server is not reachable
            _close(client, "rst")
        finally:
            self._clients.discard(client)
            self._stranded.discard(client)
            for stream in (client, server):
                if stream is not None:
                    stream.close()

    async def _ask(self, asking: StreamReader, server: StreamWriter, client: StreamWriter) -> None:
        while request := await asking.read(_CHUNK):
            await self._flowing.wait()
            if client in self._stranded:
                continue
            server.write(request)
            await server.drain()

    async def _answer(self, server: StreamReader, client: StreamWriter) -> None:
        while answer := await server.read(_CHUNK):
            await self._flowing.wait()
            if client in self._stranded:
                continue
            fault = self.plan(self.answers, answer)
            self.answers += 1
            client.write(answer if fault is None else await self._strike(fault, answer, client))
            await client.drain()
            if client.is_closing():
                return
        if client in self._stranded:
            await anyio.sleep_forever()

    async def _strike(self, fault: Fault, answer: bytes, client: StreamWriter) -> bytes:
        """Apply a fault to an answer; returns the bytes to pass on."""
        self.struck[fault.kind] += 1
        match fault.kind:
            case "delay":
                await anyio.sleep(fault.seconds)
                return answer
            case "garble":
                place = self._chance.randrange(len(answer))
                return answer[:place] + bytes([answer[place] ^ 0x80]) + answer[place + 1 :]
            case "truncate":
                client.write(answer[: len(answer) // 2])
                _close(client, "fin")
            case "stall":
                await anyio.sleep_forever()  # until the client gives up
            case "fin" | "rst":
                _close(client, fault.kind)
        return b""


def _listen(at: Path | None) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX if at else socket.AF_INET)
    listening.bind(str(at) if at else ("127.0.0.1", 0))
    listening.listen()
    listening.setblocking(False)
    return listening


async def _connect(address: Address | None) -> tuple[StreamReader, StreamWriter]:
    if isinstance(address, Path):
        return await asyncio.open_unix_connection(address)
    if address is None:
        raise OSError("the proxy has been given no server yet")
    return await asyncio.open_connection(*address)


def _close(stream: StreamWriter, kind: Literal["fin", "rst"]) -> None:
    raw = stream.get_extra_info("socket")
    if kind == "fin" or raw is None or raw.family == socket.AF_UNIX:
        stream.close()
    else:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.transport.abort()
