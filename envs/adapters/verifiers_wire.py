"""The wire of verifiers 0.4's environment servers: three frames of msgpack over ZMQ, spoken without verifiers.

::

    DEALER ->  [id, b"run", {"task_data", "client", "model", "sampling"}]       or b"health", b"cancel"
           <-  [id, b"delta", {"trace", "open" | "set" | "nodes" | "discard" ...}]     as the episode goes on
           <-  [id, b"reply", {"success", "error", "head": {"ok", "is_timeout", ...}, "traces": [{"id", ...}]}]
"""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from envs.extras import import_extra
from stream.errors import EnvironmentFailure

_LINGER_MS = 1000
"""For a message, such as a cancel, that is still on its way when its socket is closed."""
_CANCEL_S = 5.0
"""For a cancel to be queued: it never waits for the server, unless a thousand messages do."""
_encode = msgspec.msgpack.encode


class Connection:
    """A connection to a server, for one question."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    async def request(self, method: bytes, payload: object) -> dict[str, Any]:
        """Ask a question that is answered at once."""
        request_id = await self._send(method, payload)
        while True:
            kind, data = await self._receive(request_id)
            if kind == b"reply":
                return data

    async def run_episode(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Have an episode played: the reply, and the traces it speaks of, in its order.

        Cancelled, it tells the server to stop.
        """
        traces: dict[str, dict[str, Any]] = {}
        request_id = await self._send(b"run", request)
        try:
            while True:
                kind, data = await self._receive(request_id)
                if kind == b"reply":
                    listed = [traces.get(summary["id"]) for summary in data.get("traces") or ()]
                    return data, [trace for trace in listed if trace is not None]
                _apply_delta(data, traces)
        except BaseException:
            with anyio.move_on_after(_CANCEL_S, shield=True):
                await self._send(b"cancel", {"request_id": request_id.decode()})
            raise

    async def _send(self, method: bytes, payload: object) -> bytes:
        request_id = uuid.uuid4().hex.encode()
        await self._socket.send_multipart([request_id, method, _encode(payload)])
        return request_id

    async def _receive(self, request_id: bytes) -> tuple[bytes, dict[str, Any]]:
        """The next frames that belong to a request.

        Raises:
            EnvironmentFailure: they are not of this protocol.
        """
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3:
                raise EnvironmentFailure(f"{len(frames)} frames from the environment server; verifiers 0.4 sends 3")
            if frames[0] != request_id:
                continue
            try:
                data = msgspec.msgpack.decode(frames[2])
            except (msgspec.DecodeError, ValueError, TypeError) as error:
                raise EnvironmentFailure(f"the environment server sends junk: {error}") from error
            if not isinstance(data, dict):
                raise EnvironmentFailure(f"the environment server sends a {type(data).__name__}, not a map")
            return frames[1], data


@asynccontextmanager
async def open_connection(address: str) -> AsyncIterator[Connection]:
    """A connection to the server at an address, which need not be there yet: ZMQ does not say."""
    zmq = import_extra("zmq.asyncio", "verifiers")
    socket = zmq.Context.instance().socket(import_extra("zmq", "verifiers").DEALER)
    try:
        socket.connect(address)
        yield Connection(socket)
    finally:
        socket.close(linger=_LINGER_MS)


def _apply_delta(delta: Mapping[str, Any], traces: dict[str, dict[str, Any]]) -> None:
    """Bring a trace up to date. Nodes and calls are only ever added, the rest is sent whole where it changed."""
    name = str(delta.get("trace"))
    if delta.get("discard"):
        traces.pop(name, None)
        return
    trace = traces.setdefault(name, {"nodes": [], "calls": [], "errors": []})
    for field in ("nodes", "calls", "errors"):
        trace[field] += delta.get(field) or ()
    trace.update(delta.get("set") or {})
