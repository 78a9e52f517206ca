"""A handler of a process pool that looks around."""

import json
import os
import socket
from pathlib import Path


def handler():
    """Return a function that says which of the paths in its job exist, and what else there is."""
    return lambda job: json.dumps(
        {
            "files": [Path(path).exists() for path in json.loads(job)],
            "variables": [name for name in os.environ if name == "CANARY"],
            "processes": sum(_is_foreign(folder) for folder in Path("/proc").iterdir() if folder.name.isdigit()),
            "network": _connects(),
        }
    ).encode()


def _is_foreign(process):
    """Return whether a process is neither this one nor the sandbox's own."""
    return not {b"bwrap", str(os.getpid()).encode()} & {(process / "comm").read_bytes().strip(), process.name.encode()}


def _connects():
    """Return whether there is a network besides the loopback of this sandbox."""
    return len(socket.if_nameindex()) > 1
