"""The files of a private server: verified, repaired, or set aside, so that damage never prevents a start.

Everything that a run needs is in ledger, checkpoint and prompt file. If the server's files are damaged they are set
aside, the server starts empty, and the run is rebuilt: only work that was in progress is repeated.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

from stream.durable import write_file_atomically

log = structlog.get_logger()

DIGESTS: Final = "digests.json"
"""Written when the server has stopped; removed when it starts. After a crash there is none."""
_BLOCK = 1 << 20


def write_digests(data: Path) -> None:
    """Store the digest of every file of a server that has stopped. On a full disk there is none, as after a crash."""
    digests = {str(path.relative_to(data)): _digest(path) for path in _files(data)}
    try:
        write_file_atomically(data / DIGESTS, json.dumps(digests).encode())
    except OSError as error:
        log.warning("private_server.digests_not_written", folder=str(data), why=str(error))


def prepare(data: Path) -> None:
    """Check the files before the server starts: repair a torn end, set damaged files aside.

    Digests that cannot be read say nothing about the data. They are taken like none, as after a crash; the server
    itself refuses what it cannot load.
    """
    stored = data / DIGESTS
    try:
        expected = json.loads(stored.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        expected = None
    stored.unlink(missing_ok=True)
    if expected is None:
        cut_zeros(data)
    elif expected != {str(path.relative_to(data)): _digest(path) for path in _files(data)}:
        set_aside(data, "they were altered after the server had stopped")


def cut_zeros(data: Path) -> None:
    """Cut zeros from the end of the append-only file: a power failure leaves blocks that were never written.

    The server itself removes an incomplete last command, but not zeros.
    """
    files = [path for path in _files(data) if path.name.endswith(".incr.aof")]
    if not files:
        return
    newest = max(files, key=lambda path: (len(path.name), path.name))
    with newest.open("r+b") as file:
        size = end = file.seek(0, 2)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            kept = len(file.read(end - start).rstrip(b"\0"))
            end = start + kept
            if kept:
                break
        if end < size:
            file.truncate(end)
            log.warning("private_server.data_repaired", file=newest.name, zeros_cut=size - end)


def set_aside(data: Path, why: str) -> None:
    """Move the server's files to a folder of their own, so that the server starts empty."""
    target = data / f"damaged-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 1_000_000:06d}"
    target.mkdir(parents=True)
    for name in {path.relative_to(data).parts[0] for path in _files(data)}:
        (data / name).rename(target / name)
    log.warning("private_server.data_set_aside", why=why, folder=str(target), then="rebuilt from ledger and checkpoint")


def _files(data: Path) -> Iterator[Path]:
    for path in sorted((*data.glob("*.rdb"), *data.glob("*.aof"), *data.glob("appendonlydir/*"))):
        if path.is_file():
            yield path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
