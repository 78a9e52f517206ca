"""Quantities sampled during a run: on its server, of its processes, in its folder."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from stream.connection.run_connection import RunConnection
from stream.durable import write_file_atomically
from stream.operator.status import read_status
from tests.hygiene.role import ASK
from tests.preload.fixtures import pid_of

Sample = dict[str, float]
"""Quantities by `WHAT.KIND`: `server.memory`, `rollout-0.rss`, ..."""

_SIZES = {"stream": "xlen", "hash": "hlen", "set": "scard", "zset": "zcard"}


async def sample_server(connection: RunConnection) -> tuple[int, Sample]:
    """Return the number of ended prompts, and the quantities on the server."""
    counts = (await read_status(connection)).prompt_counts
    redis: Any = connection.redis
    info = await redis.info()
    names = [name async for name in redis.scan_iter(count=1000)]
    records = [name for name in names if b":payload:" in name or b":incoming:" in name]  # one for each waiting group
    elements = len(records)
    for name in names:
        kind = (await redis.type(name)).decode()
        if kind in _SIZES:
            elements += await getattr(redis, _SIZES[kind])(name)
    result = {
        "server.memory": info["used_memory"],
        "server.keys": len(names) - len(records),
        "server.elements": elements,
        "server.aof": info.get("aof_current_size", 0),
        "server.clients": info["connected_clients"],
        "server.rss": _rss(info["process_id"]),
    }
    return counts["trained"] + counts["dropped"] + counts["dead"], result


def sample_processes() -> Sample:
    """Return each role's memory, threads and open files."""
    result: Sample = {}
    for name, pid in {**_processes(), "supervisor": os.getpid()}.items():
        try:
            result[f"{name}.rss"] = _rss(pid)
            result[f"{name}.files"] = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
            result[f"{name}.threads"] = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            continue
    return result


def sample_inside(folder: Path, number: int) -> Sample | None:
    """Return each role's tasks and objects as reported for this number; None until all roles have reported.

    Call it while the run is paused and nothing is in progress: a busy worker has thousands of objects more than an idle
    one, which would hide what each group leaves behind.
    """
    inside = folder / "inside"
    inside.mkdir(exist_ok=True)
    write_file_atomically(inside / ASK, str(number).encode())
    result: Sample = {}
    for name, pid in _processes().items():
        counts_file = inside / f"{pid}.json"
        if name.startswith("engine"):
            continue
        counted = json.loads(counts_file.read_text()) if counts_file.exists() else {}
        if counted.pop("asked", 0) != number:
            return None
        result |= {f"{name}.{kind}": n for kind, n in counted.items()}
    return result


def sample_folder(folder: Path) -> Sample:
    """Return the number of files in the run's folder and the bytes of its archive, ledger, metrics and logs."""
    sizes = {}
    for place, _, names in os.walk(folder):  # skips a folder that is removed meanwhile
        for name in names:
            path = Path(place) / name
            with suppress(FileNotFoundError):
                sizes[path.relative_to(folder).parts] = path.stat().st_size
    return {
        "folder.files": len(sizes),
        "folder.archive": sum(size for parts, size in sizes.items() if parts[0] == "groups"),
        "folder.ledger": sizes.get(("ledger.jsonl",), 0),
        "folder.metrics": sizes.get(("metrics.jsonl",), 0),
        "folder.logs": sum(size for parts, size in sizes.items() if parts[0] == "logs"),
    }


def _processes() -> dict[str, int]:
    """Return the pids of the processes that the supervisor in this process started: `rollout-0`, `rollout-1`, ..."""
    result: dict[str, list[int]] = {}
    for child in psutil.Process().children():
        try:
            words = child.cmdline()
        except psutil.Error:  # it has just ended
            continue
        for place, word in enumerate(words):
            if word.endswith("hygiene/role.py"):
                result.setdefault(words[place + 1], []).append(pid_of(child.pid))
            elif word.endswith("hygiene/engine.py"):
                result.setdefault("engine", []).append(pid_of(child.pid))
    return {f"{role}-{index}": pid for role, pids in result.items() for index, pid in enumerate(sorted(pids))}


def _rss(pid: int) -> int:
    """Return the bytes that no file backs: pages of libraries that a process first reads at its end are no leak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")  # and nobody has waited for it yet
