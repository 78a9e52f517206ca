"""The nodes of a cluster that a run may be on. A server outside a cluster is the only node.

All keys of a run are in one slot, so one node has the whole run at any time, and one plain client talks to it. A
client that knows all slots would do harm: while a slot is being moved it follows ASK to a node with only some of the
run's keys, where a script would find no streams and create them again. This client waits for the end of the move
instead.
"""

import contextlib
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import MovedError

from stream.connection.address import RedisAddress
from stream.connection.server_errors import HANDLED_ERRORS

log = structlog.get_logger()

HostPort = tuple[str, int]


class ClusterRouter:
    """The client of the node that has the run, and the clients of nodes that had it before."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._current: HostPort | None = address.host_port
        self._known_nodes: list[HostPort] = []
        self._clients: dict[HostPort | None, Redis] = {self._current: address.client()}

    @property
    def redis(self) -> "Redis":
        """The client of the node that has the run, as far as known."""
        return self._clients[self._current]

    def redirect(self, error: MovedError) -> None:
        """Switch to the node that a MOVED reply names as the owner of the run's slot."""
        self._switch_to((self._host_name(error.host.encode()), error.port))

    def try_next_node(self) -> None:
        """Switch to another known node after the current one failed; every node can name the one with the run."""
        if self._known_nodes:
            at = self._known_nodes.index(self._current) if self._current in self._known_nodes else -1
            self._switch_to(self._known_nodes[(at + 1) % len(self._known_nodes)])

    async def refresh(self) -> None:
        """Ask the current node for the other nodes; if it does not answer, the known nodes stay as they are."""
        with contextlib.suppress(*HANDLED_ERRORS):
            slots: Any = await self.redis.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            nodes = {(self._host_name(host), port) for _, _, *owners in slots for host, port, *_ in owners}
            seed = {self._address.host_port} - {None}
            self._known_nodes = [*seed, *sorted(nodes - seed)]  # type: ignore[list-item]

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    def _host_name(self, host: bytes | None) -> str:
        """Return a node's host. A node that does not know its own name sends none: it is the host we reached."""
        return host.decode() if host else self._current[0] if self._current else "localhost"

    def _switch_to(self, node: HostPort) -> None:
        if node == self._current:
            return
        log.info("redis.redirected", node=f"{node[0]}:{node[1]}")
        if node not in self._clients:
            self._clients[node] = self._address.client(node)
        self._current = node
