"""The protocol of verifiers 0.4's environment servers: three ZMQ frames with msgpack, without importing verifiers.

::

    DEALER ->  [id, b"run", {"task_data", "client", "model", "sampling"}]       or b"health", b"cancel"
           <-  [id, b"delta", {"trace", "open" | "set" | "nodes" | "discard" ...}]     while the episode runs
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
"""Time to send pending messages, such as a cancel, after the socket is closed."""
_CANCEL_S = 5.0
"""Time to queue a cancel; it blocks only if about a thousand messages are already queued."""
_encode = msgspec.msgpack.encode


class Connection:
    """A connection to a server, for one request."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    async def request(self, method: bytes, payload: object) -> dict[str, Any]:
        """Send a request with a single reply."""
        request_id = await self._send(method, payload)
        while True:
            kind, data = await self._receive(request_id)
            if kind == b"reply":
                return data

    async def run_episode(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Run an episode; return the final reply and its traces in order. Cancellation stops it on the server."""
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
        """Wait for the next message of a request; return its kind and data.

        Raises:
            EnvironmentFailure: the message does not follow the protocol.
        """
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3:
                raise EnvironmentFailure(f"{len(frames)} frames from the environment server; verifiers 0.4 sends 3")
            if frames[0] != request_id:
                continue
            try:
                data = msgspec.msgpack.decode(frames[2])
            except (ValueError, TypeError) as error:
                raise EnvironmentFailure(f"the environment server sent an invalid message: {error}") from error
            if not isinstance(data, dict):
                raise EnvironmentFailure(f"the environment server sends a {type(data).__name__}, not a map")
            return frames[1], data


@asynccontextmanager
async def open_connection(address: str) -> AsyncIterator[Connection]:
    """Open a connection. ZMQ does not report whether a server is listening."""
    zmq = import_extra("zmq.asyncio", "verifiers")
    socket = zmq.Context.instance().socket(import_extra("zmq", "verifiers").DEALER)
    try:
        socket.connect(address)
        yield Connection(socket)
    finally:
        socket.close(linger=_LINGER_MS)


def _apply_delta(delta: Mapping[str, Any], traces: dict[str, dict[str, Any]]) -> None:
    """Apply an update to a trace: nodes, calls and errors are appended, other fields replaced."""
    name = str(delta.get("trace"))
    if delta.get("discard"):
        traces.pop(name, None)
        return
    trace = traces.setdefault(name, {"nodes": [], "calls": [], "errors": []})
    for field in ("nodes", "calls", "errors"):
        trace[field] += delta.get(field) or ()
    trace.update(delta.get("set") or {})
