"""Watches how much memory processes hold, whether the machine swaps, and the pressure on memory (PSI)."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import psutil
import structlog

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.memory import REPORT_S, MachineMemory, ProcessMemory, report_memory
from workers.role.memory import pressure_files, read_memory

log = structlog.get_logger()

WATCHED: Final = "PENSTOCK_WATCHED"
"""Environment variable of a process whose memory `penstock run` reports."""
_ROOT: Final = Path("/")
_OWN: Final = ("RssAnon", "RssShmem", "VmSwap")
"""Lines of `/proc/PID/status`; files in memory are not a process's own, and the kernel gives them up."""


class MemoryReader:
    """Reads the memory of some processes and of the machine; the first reading knows no rate of swapping.

    Args:
        root: folder with `proc` and `sys`; tests give one of their own.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._swapped: tuple[float, int] | None = None
        """When it was last read, and the pages swapped in and out since the machine started."""

    def read(self, processes: Mapping[str, int]) -> MachineMemory:
        """Return the memory of these processes, by name and id, each with its descendants. Blocks on files."""
        memory, children = read_memory(self._root), _children(self._root)
        return MachineMemory(
            host=socket.gethostname(),
            total=memory.total,
            available=memory.available,
            source=memory.source,
            swap_rate=self._swap_rate(),
            pressure=self._pressure(),
            processes=[
                self._sum(name, pid, children, others=set(processes.values()) - {pid})
                for name, pid in processes.items()
            ],
        )

    def _sum(self, name: str, pid: int, children: Mapping[int, list[int]], others: set[int]) -> ProcessMemory:
        """Return what a process holds with its descendants, unless these have names of their own."""
        held = swapped = 0
        waiting = [pid]
        while waiting:
            each = waiting.pop()
            waiting += [child for child in children.get(each, ()) if child not in others]
            sizes = self._sizes(each)
            held += sum(sizes.values())
            swapped += sizes.get("VmSwap", 0)
        return ProcessMemory(name=name, bytes=held, swapped=swapped)

    def _sizes(self, pid: int) -> dict[str, int]:
        try:
            text = (self._root / f"proc/{pid}/status").read_text()
        except OSError:  # it has ended, or this is not Linux
            return _sizes_by_psutil(pid) if self._root == _ROOT else {}
        lines = (line.partition(":") for line in text.splitlines())
        return {name: int(value.split()[0]) << 10 for name, _, value in lines if name in _OWN}

    def _swap_rate(self) -> float:
        """Return the bytes per second that were swapped in or out since the last call."""
        try:
            lines = (self._root / "proc/vmstat").read_text().splitlines()
        except OSError:
            return 0.0
        counters = dict(line.split(maxsplit=1) for line in lines)
        now, pages = time.monotonic(), int(counters.get("pswpin", 0)) + int(counters.get("pswpout", 0))
        before, self._swapped = self._swapped, (now, pages)
        if before is None or now <= before[0]:
            return 0.0
        return (pages - before[1]) * os.sysconf("SC_PAGE_SIZE") / (now - before[0])

    def _pressure(self) -> float | None:
        """Return the larger of the pressures on the machine and on this container."""
        shares = []
        for file in pressure_files(self._root):
            try:
                some = file.read_text().partition("avg10=")[2].split()[0]
                shares.append(float(some) / 100)
            except (OSError, ValueError, IndexError):  # no such file system, or PSI is switched off
                continue
        return max(shares, default=None)


def _children(root: Path) -> dict[int, list[int]]:
    """Return the children of every process."""
    found: dict[int, list[int]] = {}
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        found.setdefault(parent, []).append(int(folder.name))
    return found


def _sizes_by_psutil(pid: int) -> dict[str, int]:
    try:
        return {"RssAnon": int(psutil.Process(pid).memory_info().rss)}
    except psutil.Error:
        return {}


class MemoryReports:
    """Reports the memory of this machine's processes of a run to its server, every two seconds.

    Args:
        reporter: who reports.
        processes: returns the ids of the processes, by name.
        show: called with a line when the machine begins to have too little memory, and when it has enough again.
    """

    def __init__(
        self,
        reporter: str,
        processes: Callable[[], Mapping[str, int]],
        show: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.problem = ""
        """Which process makes the machine swap; empty if none does."""
        self._reporter, self._processes, self._show = reporter, processes, show
        self._reader = MemoryReader()
        self._failed = False

    async def run(self, connection: RunConnection) -> None:
        """Report to a run until cancelled; run it in the process's task group."""
        while True:
            report = await anyio.to_thread.run_sync(self._reader.read, self._processes())
            self._tell(report)
            await self._report(connection, report)
            await anyio.sleep(REPORT_S)

    def _tell(self, report: MachineMemory) -> None:
        """Log and show a problem when it begins, and when it is over."""
        before, self.problem = self.problem, report.problem
        if self.problem and not before:
            largest = report.largest
            log.warning(
                "memory.short",
                process=largest.name if largest else None,
                why=self.problem,
                swap_rate=round(report.swap_rate),
                pressure=report.pressure,
            )
            self._show(f"limited by memory: {self.problem}")
        elif before and not self.problem:
            log.info("memory.enough", available=report.available)
            self._show("there is enough memory again")

    async def _report(self, connection: RunConnection, report: MachineMemory) -> None:
        """Write a report. Nothing depends on it, so a server that does not take it is no error."""
        try:
            await report_memory(connection, self._reporter, report)
        except PenstockError as error:
            if not self._failed:
                log.warning("memory.report_failed", why=str(error))
            self._failed = True
