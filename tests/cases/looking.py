"""A handler of a process pool that counts the processes it sees."""

import os
from pathlib import Path


def handler():
    """Return a function that ignores its job."""

    def look(_):
        processes = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        others = len({*processes} - {1, os.getpid()})
        return f"{others + 1} process, uid {os.getuid()}".encode()

    return look
