"""Free ports for servers that cannot choose one by themselves."""

import os
import socket

from stream.errors import EngineError


def cannot_listen(host: str, port: int, error: OSError | OverflowError) -> EngineError:
    """Return the error of a server that cannot listen, without what asyncio repeats of the address."""
    number = getattr(error, "errno", None) or 0
    why = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
    return EngineError(f"cannot listen on {host}{f':{port}' if port else ''}: {why[:1].lower()}{why[1:]}")


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
        raise cannot_listen(host, port, error) from error
