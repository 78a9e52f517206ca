"""Reports of the memory that a run's processes hold, by machine: for people, so nothing depends on them."""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.wording import format_bytes

REPORT_S: Final = 2.0
"""Seconds between two reports."""
_EXPIRES_S: Final = 15.0
"""An older report is of a process that has ended."""
SWAPPING: Final = 1 << 20
"""Bytes per second, swapped in or out, from which a machine swaps."""
PRESSED: Final = 0.1
"""Share of the last ten seconds in which some process waited for memory, from which a machine has too little."""


class ProcessMemory(Struct, frozen=True, kw_only=True, array_like=True):
    """What one process of a run holds, with the processes that it started."""

    name: str
    """Such as `train-0`."""
    bytes: int
    """Memory that is its own, swapped out or not; libraries that processes share are not in it."""
    swapped: int = 0
    """The part that is swapped out."""


class MachineMemory(Struct, frozen=True, kw_only=True):
    """Memory of one machine, or of the container in which the run's processes are, as they see it."""

    host: str
    total: int
    """Bytes that the machine has, or its container may use."""
    available: int
    source: str = "machine"
    """What limits it: `machine`, `cgroup` or `ulimit`."""
    swap_rate: float = 0.0
    """Bytes per second that were swapped in or out since the last report."""
    pressure: float | None = None
    """Share of the last ten seconds in which some process waited for memory (PSI); None: the kernel does not say."""
    processes: list[ProcessMemory] = []

    @property
    def is_short(self) -> bool:
        """Whether there is too little memory: the machine swaps, or processes wait for it."""
        return self.swap_rate >= SWAPPING or (self.pressure or 0.0) >= PRESSED

    @property
    def largest(self) -> ProcessMemory | None:
        """The process that holds most."""
        return max(self.processes, key=lambda each: each.bytes, default=None)

    @property
    def problem(self) -> str:
        """Which process holds most, and how the lack of memory shows; empty if there is enough."""
        if not self.is_short:
            return ""
        largest = self.largest
        what = "the machine swaps"
        if self.swap_rate < SWAPPING:
            what = f"processes wait for memory {self.pressure or 0.0:.0%} of the time"
        if largest is None:
            return f"{what} ({self.host})"
        return f"{largest.name} holds {format_bytes(largest.bytes)} of {format_bytes(self.total)}, {what}"


async def report_memory(connection: RunConnection, reporter: str, report: MachineMemory) -> None:
    """Replace the last report of this reporter.

    Raises:
        ServerError: the server does not take it.
    """
    await connection.run_script("report_memory", reporter, msgspec.json.encode(report))


def read_reports(reports: Mapping[str, str], now_ms: float) -> list[MachineMemory]:
    """Return the newest reports of all machines; what cannot be read, or is old, is left out.

    Args:
        reports: as the server has them, by reporter.
        now_ms: the server's time.
    """
    found: list[MachineMemory] = []
    for text in reports.values():
        at, _, body = text.partition(" ")
        try:
            if now_ms - float(at) <= _EXPIRES_S * 1000:
                found.append(msgspec.json.decode(body, type=MachineMemory))
        except ValueError:
            continue
    return sorted(found, key=lambda each: each.host)
