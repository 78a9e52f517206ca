"""How much memory a machine, or the container that this process is in, has for a run.

A limit may be set by a control group (version 2 or 1) at any level above this process, by `ulimit -v`, or by the
machine itself; the smallest one counts. In a container the path in `/proc/self/cgroup` may be that of the host, which
the container does not see; then its own group is mounted at the root.
"""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import psutil
from msgspec import Struct

BUDGET: Final = "PENSTOCK_TRAINER_MEMORY"
"""Environment variable in which `penstock run` tells the trainer how many bytes of main memory it may use."""
_ROOT: Final = Path("/")
_LARGEST_CACHE, _CACHE_SHARE = 2_000_000_000, 16
"""An engine's cache of keys and values has at most this many bytes, and this part of main memory; chosen."""
_TOKENS_WITH_GAPS: Final = 4096
"""With more tokens most blocks of a pass exceed 32 MB, above which the C library keeps none; a rough figure."""
_UNLIMITED: Final = 1 << 60
"""Version 1 says "no limit" by a number near 2**63."""


class Memory(Struct, frozen=True, kw_only=True):
    """Main memory, in bytes."""

    total: int
    available: int
    """What can be used without swapping: free memory, and caches of files, which the kernel gives up."""
    source: str
    """What limits it: `machine`, `cgroup` or `ulimit`."""


class PassMemory(Struct, frozen=True, kw_only=True):
    """Bytes that one pass forward and backward holds beside weights, gradients and optimizer."""

    constant: float
    """Of a pass of any size: blocks of logits, weights in another dtype, and the largest new gradients."""
    per_token: float
    per_token_and_length: float = 0.0
    """For each token, times the length of its row: an attention that stores all its scores has this."""
    gaps_per_token: float = 0.0
    """Gaps between the blocks of the heap. Blocks of larger passes lie outside of it, and leave none."""

    def bytes_of(self, tokens: int, longest: int) -> float:
        """Return the bytes of a pass over this number of tokens, in rows of at most this length."""
        stored = tokens * (self.per_token + self.per_token_and_length * min(tokens, longest))
        return self.constant + stored + self.gaps_per_token * min(tokens, _TOKENS_WITH_GAPS)

    def tokens_in(self, room: float, longest: int) -> int:
        """Return the most tokens whose pass takes at most `room` bytes; 0 if not even one fits."""
        fitting, too_many = 0, 1 << 20
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            if self.bytes_of(middle, longest) <= room:
                fitting = middle
            else:
                too_many = middle
        return fitting


class _Group(Struct, frozen=True):
    """One control group with a limit."""

    limit: int
    used: int
    """Without caches of files."""


def read_memory(root: Path = _ROOT) -> Memory:
    """Return the main memory that this process and its siblings can use.

    Args:
        root: folder with `proc` and `sys`; tests give one of their own.
    """
    machine = psutil.virtual_memory() if root == _ROOT else _read_meminfo(root)
    found = Memory(total=machine.total, available=machine.available, source="machine")
    for group in _limited_groups(root):
        available = max(0, group.limit - group.used)
        if available < found.available:
            found = Memory(total=min(group.limit, found.total), available=available, source="cgroup")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if root == _ROOT and limit != resource.RLIM_INFINITY:
        available = max(0, limit - psutil.Process().memory_info().vms)
        if available < found.available:
            found = Memory(total=min(limit, found.total), available=available, source="ulimit")
    return found


def engine_cache_bytes(given: Literal["auto"] | int) -> int:
    """Return how many bytes the keys and values of a local engine may take, by `engine.max_cache_bytes`."""
    return min(_LARGEST_CACHE, read_memory().total // _CACHE_SHARE) if given == "auto" else given


def pressure_files(root: Path = _ROOT) -> list[Path]:
    """Return the files with the memory pressure (PSI) of this process's group and of the machine that exist."""
    own = [folder / "memory.pressure" for version, folder in _groups(root) if version == 2][:1]
    return [file for file in (*own, root / "proc/pressure/memory") if file.is_file()]


class _MachineMemory(Struct, frozen=True):
    total: int
    available: int


def _read_meminfo(root: Path) -> _MachineMemory:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    sizes = {name.rstrip(":"): int(number) << 10 for name, number, *_ in lines}
    return _MachineMemory(sizes["MemTotal"], sizes["MemAvailable"])


def _limited_groups(root: Path) -> Iterator[_Group]:
    """Yield every group above this process that has a limit."""
    for version, folder in _groups(root):
        limit_name, used_name = (
            ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        yield _Group(limit, max(0, used - _file_caches(folder / "memory.stat", version)))


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of this process's memory groups, each before the one that contains it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, mounts = 2, ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            version, mounts = 1, ["sys/fs/cgroup/memory"]
        else:
            continue
        for mount in mounts:
            top = root / mount
            folder = top / path.lstrip("/")
            while folder.is_relative_to(top):
                if folder.is_dir():
                    yield version, folder
                if folder == top:
                    break
                folder = folder.parent


def _read_number(file: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or it says `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _file_caches(file: Path, version: int) -> int:
    """Return the bytes of files that a group, with the groups in it, holds in memory."""
    try:
        stat = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    prefix = "" if version == 2 else "total_"
    return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
