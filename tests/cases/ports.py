"""Free ports of this machine, for servers that need a port number in advance."""

import socket


def free_ports(count: int) -> list[int]:
    """Return different ports without a listener."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def free_port() -> int:
    """Return a port without a listener."""
    return free_ports(1)[0]


def has_ipv6() -> bool:
    """Return whether this machine has the loopback address of IPv6; many containers have none."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
