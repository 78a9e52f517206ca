"""Check that a long run grows nowhere except by design.

    python -m tests.soak.hygiene --groups 100000 --json

Nothing is killed. During the run these are sampled: the server's memory, keys, elements and append-only file; each
process's memory, open files, threads, tasks and objects; the files of the run's folder. Prints each quantity's first
and last third and its slope; exits with 1 if one grew beyond its bound (`growth.py`), or the run did not finish.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
from redis.exceptions import RedisError

from stream.connection.run_connection import RunConnection
from stream.durable import write_file_atomically
from stream.errors import PenstockError
from stream.operator.control import pause, resume
from stream.operator.status import read_status
from tests.preload.fixtures import pid_of
from tests.soak.ends import LEAK, NO_SIGNAL, TRAINED, numbers_with
from tests.soak.growth import Sample, judge
from tests.soak.project import ENGINE_PROGRAM, ROLE_PROGRAM, write_project
from tests.soak.role import ASK, INSIDE
from tests.soak.run import begin, conclude, count_ended, processes, run_parser, supervise, why_unfinished
from workers.launch.specs import ENGINE
from workers.settings import Settings
from workers.terminal.progress import choose_display

SAMPLES = 300
"""Fewest samples of a run; a short run has fewer."""
RESTS = (0.2, 0.45, 0.7)
"""Fractions of the groups at which the run is paused until nothing is in progress, to count the objects that remain."""
ARCHIVE_MB = 8
_SIZES = {"stream": "xlen", "hash": "hlen", "set": "scard", "zset": "zcard"}
_PROGRAMS = {role: (ROLE_PROGRAM, role, "--counted") for role in ("feed", "rollout", "score", "train")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, sample, judge; returns the exit code."""
    parser = run_parser(__doc__, groups=100_000, limit_s=7200.0)
    parser.add_argument(
        "--leak", type=int, default=0, help="objects that a scorer is to keep of each group, by mistake"
    )
    options = parser.parse_args(arguments)
    os.environ[LEAK] = str(options.leak)
    folder = begin(options, "hygiene")
    sampler = Sampler(describe(folder, options.groups, options.seed), options.groups)
    began = time.monotonic()
    outcome = supervise(
        sampler.settings,
        sampler.run,
        limit_s=options.limit,
        display=choose_display(options.json),
        **{ENGINE: (ENGINE_PROGRAM,)},
        **_PROGRAMS,
    )
    seconds = round(time.monotonic() - began, 1)
    quantities = judge(sampler.samples, options.groups, {"folder.archive": ARCHIVE_MB * 1e6})
    problem = why_unfinished(outcome)
    status = outcome.status if outcome is not None and not problem else None
    ended = 0 if status is None else count_ended(status) - status.dead
    grown = sorted(name for name, quantity in quantities.items() if not quantity.well)
    report = {"groups": options.groups, "ended": ended, "seconds": seconds, "samples": len(sampler.samples)}
    report |= {"grown": grown, "quantities": msgspec.to_builtins(quantities)}
    if not problem and (ended < options.groups or not quantities):
        problem = f"{ended} groups were trained or dropped, and {len(quantities)} quantities measured"
    return conclude(options, folder, report, problem or ", ".join(grown), _table(report))


def describe(folder: Path, groups: int, seed: int) -> Settings:
    """Write a project whose prompts are all trained, but for some without a signal, which are dropped."""
    return write_project(
        folder,
        numbers_with(groups, TRAINED, NO_SIGNAL),
        seed,
        run={"dashboard": "on"},
        data={"max_queued_prompts": 64},
        queue={"lease_s": 15.0},
        rollout={"groups_in_flight": 16},
        train={"batch_size": 32, "publish_every": 2, "save_every": 4},
        archive={"keep": ARCHIVE_MB},
    )


class Sampler:
    """Takes samples of a run in progress, and adds each to a file, for analysis beyond thirds."""

    def __init__(self, settings: Settings, groups: int) -> None:
        self.settings = settings
        self.samples: list[tuple[int, Sample]] = []
        """Pairs of ended groups and the quantities measured at that point."""
        self._folder, self._groups = settings.folder, groups
        self._file = settings.folder.parent / "samples.jsonl"

    async def run(self, connection: RunConnection) -> None:
        """Take a sample after every 1 / (2 * `SAMPLES`) of the groups, but at most four times a second."""
        last, rests = -1, [part * self._groups for part in RESTS]
        while True:
            await anyio.sleep(0.25)
            try:
                ended, on_server = await _sample_server(connection)
            except (PenstockError, RedisError):  # no role has started, or the server has stopped
                continue
            if ended == last or ended < last + self._groups / SAMPLES / 2:
                continue
            if rests and ended >= rests[0]:  # at once: a sample takes so long that the run might finish meanwhile
                self.samples.append(await self._at_rest(connection, len(RESTS) + 1 - len(rests)))
                last = rests.pop(0)
            else:
                elsewhere = await anyio.to_thread.run_sync(lambda: _sample_processes() | _sample_folder(self._folder))
                self.samples.append((ended, on_server | elsewhere))
                last = ended
            async with await anyio.open_file(self._file, "a") as file:
                await file.write(json.dumps(self.samples[-1]) + "\n")

    async def _at_rest(self, connection: RunConnection, number: int) -> tuple[int, Sample]:
        """Pause the run until nothing is in progress, collect every role's counts, and resume it."""
        await pause(connection, "hygiene")
        while True:
            status = await read_status(connection)
            busy = (status.stages["prompts"].claimed, status.stages["groups"].depth, status.stages["scored"].lag)
            if not any(busy):
                break
            await connection.wait_for_change("$", 0.2)
        while (result := await anyio.to_thread.run_sync(_sample_inside, self._folder, number)) is None:
            await anyio.sleep(0.05)
        with suppress(PenstockError):  # the last groups were trained while the run was paused, so it has finished
            await resume(connection, "hygiene")
        return count_ended(status), result


async def _sample_server(connection: RunConnection) -> tuple[int, Sample]:
    """Return the number of ended prompts, and the quantities on the server."""
    ended = count_ended(await read_status(connection))
    redis: Any = connection.redis
    info = await redis.info()
    names = [name async for name in redis.scan_iter(count=1000)]
    records = [name for name in names if b":payload:" in name or b":incoming:" in name]  # one for each waiting group
    elements = len(records)
    for name in names:
        kind = (await redis.type(name)).decode()
        if kind in _SIZES:
            elements += await getattr(redis, _SIZES[kind])(name)
    return ended, {
        "server.memory": info["used_memory"],
        "server.keys": len(names) - len(records),
        "server.elements": elements,
        "server.aof": info.get("aof_current_size", 0),
        "server.clients": info["connected_clients"],
        "server.rss": _rss(info["process_id"]),
    }


def _sample_processes() -> Sample:
    """Return each role's memory, threads and open files."""
    result: Sample = {}
    for name, pid in {**_pids(), "supervisor": os.getpid()}.items():
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
            result[f"{name}.rss"] = _rss(pid)
            result[f"{name}.files"] = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
            result[f"{name}.threads"] = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    return result


def _sample_inside(folder: Path, number: int) -> Sample | None:
    """Return each role's tasks and objects as reported for this number; None until all roles have reported.

    Call it while the run is paused and nothing is in progress: a busy worker has thousands of objects more than an idle
    one, which would hide what each group leaves behind.
    """
    inside = folder / INSIDE
    inside.mkdir(exist_ok=True)
    write_file_atomically(inside / ASK, str(number).encode())
    result: Sample = {}
    for name, pid in _pids().items():
        counts_file = inside / f"{pid}.json"
        if name.startswith(ENGINE):
            continue
        counted = json.loads(counts_file.read_text()) if counts_file.exists() else {}
        if counted.pop("asked", 0) != number:
            return None
        result |= {f"{name}.{kind}": n for kind, n in counted.items()}
    return result


def _sample_folder(folder: Path) -> Sample:
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


def _pids() -> dict[str, int]:
    """Return the pids of the run's roles and engine: `rollout-0`, `rollout-1`, ..."""
    names = {role: sorted(map(pid_of, pids)) for role, pids in processes().items() if role in {*_PROGRAMS, ENGINE}}
    return {f"{role}-{index}": pid for role, pids in names.items() for index, pid in enumerate(pids)}


def _rss(pid: int) -> int:
    """Return the bytes that no file backs: pages of libraries that a process first reads at its end are no leak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")  # and nobody has waited for it yet


def _table(report: dict) -> str:
    lines = [
        f"{report['ended']:,} of {report['groups']:,} groups in {report['seconds']} s, {report['samples']} samples"
    ]
    lines.append(f"{'':24}{'first third':>16}{'last third':>16}{'per 1,000':>14}{'largest':>16}{'may grow by':>16}")
    for name, v in report["quantities"].items():
        allowed = "by design" if v["allowed"] is None else f"{v['allowed']:,.0f}"
        mark = "" if v["well"] else "   GREW"
        numbers = f"{v['first']:16,.0f}{v['last']:16,.0f}{v['per_1000']:14,.1f}{v['largest']:16,.0f}{allowed:>16}"
        lines.append(f"{name:24}{numbers}{mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
