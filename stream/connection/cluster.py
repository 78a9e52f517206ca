"""The nodes of a cluster that a run may be on. A server that is in no cluster is the only one.

All keys of a run are in one slot, so at any time one node has all of it, and one plain client speaks to that node. A
client that knows all slots would gain nothing, and would do one thing wrong: while a slot moves, it follows ASK to a
node that has part of the run's keys, where a script would find streams missing and begin them anew. We wait for the end
of the move instead.
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
    """The client of the node that has the run, and those of nodes that had it."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._current: HostPort | None = address.host_port
        self._known_nodes: list[HostPort] = []
        self._clients: dict[HostPort | None, Redis] = {self._current: address.client()}

    @property
    def redis(self) -> "Redis":
        """The client of the node that has the run, as far as we know."""
        return self._clients[self._current]

    def redirect(self, error: MovedError) -> None:
        """Go to the node that a server named as the owner of the run's slot."""
        self._switch_to((self._host_name(error.host.encode()), error.port))

    def try_next_node(self) -> None:
        """This one is gone: any other of the cluster knows who has the run now, or will."""
        if self._known_nodes:
            at = self._known_nodes.index(self._current) if self._current in self._known_nodes else -1
            self._switch_to(self._known_nodes[(at + 1) % len(self._known_nodes)])

    async def refresh(self) -> None:
        """Ask this node who the others are; where it will not say, we know what we were told before."""
        with contextlib.suppress(*HANDLED_ERRORS):
            slots: Any = await self.redis.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            places = {(self._host_name(host), port) for _, _, *nodes in slots for host, port, *_ in nodes}
            seed = {self._address.host_port} - {None}
            self._known_nodes = [*seed, *sorted(places - seed)]  # type: ignore[list-item]

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    def _host_name(self, host: bytes | None) -> str:
        """A host as a node names it; one that does not know its own name means the one that we reached it by."""
        return host.decode() if host else self._current[0] if self._current else "localhost"

    def _switch_to(self, node: HostPort) -> None:
        if node == self._current:
            return
        log.info("redis.redirected", node=f"{node[0]}:{node[1]}")
        if node not in self._clients:
            self._clients[node] = self._address.client(node)
        self._current = node
