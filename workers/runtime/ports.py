"""Free ports for servers that cannot choose one by themselves."""

import socket

from stream.errors import EngineError


def free_port(host: str, port: int = 0) -> int:
    """Return the port if it is free now, or any free port for 0; the server should bind it within seconds.

    Args:
        host: address of the server; empty: every address of this machine.
        port: 0 for any.

    Raises:
        EngineError: this machine does not have the address, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore TIME_WAIT
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:  # a port above 65535 is the latter
        raise EngineError(f"cannot listen on {host}{f':{port}' if port else ''}: {error}") from error
