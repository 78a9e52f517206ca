"""Ports of this machine for servers that are told theirs."""

import socket


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def free_port() -> int:
    """A port that nobody listens on now."""
    return free_ports(1)[0]
