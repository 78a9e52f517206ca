"""Carry out a schedule of kills on a run in progress."""

import math
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgspec
import psutil
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from stream.connection.run_connection import RunConnection, connect
from stream.errors import PenstockError
from stream.operator.control import pause, resume
from stream.operator.status import RunStatus, read_status
from stream.trainer.ledger_records import read_contents
from tests.chaos.schedule import SERVER, Blow
from workers.runs.live_run import LiveRun, read_live
from workers.train.checkpointing.checkpoint import MANIFEST, Manifest

_ABSENT_S = 3.0
"""A role that is not running again after this long has nothing left to do; another role is killed in its place."""
_FSYNC_S = 5.0
"""Longest wait for a moment at which the server is in `fsync`."""
_BALLAST = 48 * 1024 * 1024
_EVERYSEC_S = 1.0
"""Interval of the server's `fsync` calls with `appendfsync everysec`."""
_AHEAD = 0.02
"""How far, as a fraction of the prompts, the run may pass the next blow before it is paused; it must not end first."""


@dataclass(kw_only=True)
class RoleKiller:
    """Carries out the schedule."""

    folder: Path
    """Folder of the run."""
    groups: int
    fsync: str
    """The server's `appendfsync`."""
    blows: list[Blow]
    killed: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)
    """Kills of the server that lost writes, by kind."""
    between: int = 0
    """Kills at which a checkpoint was durable and its groups not yet acknowledged."""
    limit: float = 0.0
    """How far the run may go for now, as a fraction of its prompts."""
    looks: int = 0
    """How often the run's account was read."""
    unbalanced: list[dict[str, int]] = field(default_factory=list)
    """Accounts that were read and did not balance."""

    @property
    def kept(self) -> bool:
        """Whether every scheduled kill was carried out."""
        return self.killed.total() == sum(len(blow.roles) for blow in self.blows)

    async def run(self) -> None:
        """Carry out all blows in order."""
        live = await self._live()
        async with connect(live.redis, live.run, create=False) as connection, anyio.create_task_group() as tasks:
            tasks.start_soon(self._hold_back, connection)
            for place, blow in enumerate(self.blows):
                later = (after.fraction for after in self.blows[place + 1 :] if after.when != "soon")
                self.limit = next(later, 1.0) + _AHEAD
                await self._reached(blow.fraction, connection)
                await self._deal(blow, live, connection)
            # A server that lost writes may need a second `resume`.
            await self._reached(1.0, connection)
            tasks.cancel_scope.cancel()

    async def _hold_back(self, connection: RunConnection) -> None:
        """Pause the run while it is ahead of the schedule; otherwise it could end before its last kill."""
        while True:
            status = await self._look(connection)
            ahead = status is not None and _ended(status) >= self.limit * self.groups
            if status is not None and ahead != bool(status.paused):
                with suppress(PenstockError):  # the run has finished
                    await (pause if ahead else resume)(connection, "chaos")
            await connection.wait_for_change("$", 0.2)

    async def _deal(self, blow: Blow, live: LiveRun, connection: RunConnection) -> None:
        await anyio.sleep(blow.delay_s)
        if blow.when == "checkpoint":
            self.limit = math.inf  # a paused run would never write a checkpoint
            await self._checkpoint_appears()
        # With `always` the server does nothing else during `fsync`, and a power failure loses nothing.
        aimed = {"fsync": _kill_in_fsync, "power": _cut_power}.get(blow.when) if self.fsync == "everysec" else None
        if aimed is not None and await anyio.to_thread.run_sync(aimed, live.redis, self.folder / "redis"):
            self.caught[blow.when] += 1
            self.killed[SERVER] += 1
        else:
            await self._strike(blow.roles)
        if blow.when == "checkpoint":
            self.between += await self._was_between(connection)

    async def _live(self) -> LiveRun:
        """Wait until the engine is running, and with it the other roles."""
        while (live := read_live(self.folder)) is None or not live.engines:
            await anyio.sleep(0.02)
        return live

    async def _reached(self, fraction: float, connection: RunConnection) -> None:
        while (status := await self._look(connection)) is None or _ended(status) < fraction * self.groups:
            await connection.wait_for_change("$", 0.5)

    async def _look(self, connection: RunConnection) -> RunStatus | None:
        """Read the run's status, and check that its account balances: at every moment, recoveries included."""
        try:
            status = await read_status(connection)
        except PenstockError:  # no role has started
            return None
        self.looks += 1
        counts = status.prompt_counts
        if counts["fed"] != sum(n for name, n in counts.items() if name != "fed") or counts["fed"] > self.groups:
            self.unbalanced.append(counts)
        return status

    async def _checkpoint_appears(self) -> None:
        """Wait for a new checkpoint folder; polls, because the gap to hit is a few milliseconds wide."""
        folder = self.folder / "checkpoints"

        def names() -> set[str]:
            return {path.name for path in folder.glob("step-*")}

        before = names()
        while not names() - before:
            await anyio.sleep(0.0005)

    async def _strike(self, wanted: tuple[str, ...]) -> None:
        """Kill one process of each of these roles, all at once."""
        chosen: dict[int, str] = {}
        for role in wanted:
            with anyio.move_on_after(_ABSENT_S):
                while not (pids := processes().get(role, set()) - chosen.keys()):
                    await anyio.sleep(0.02)
                chosen[min(pids)] = role
        for pid, role in chosen.items():
            os.kill(pid, signal.SIGKILL)
            self.killed[role] += 1
        missing = len(wanted) - len(chosen)
        if missing:
            others = [role for role, pids in processes().items() for _ in pids - chosen.keys() if role != SERVER]
            await self._strike(tuple(others[:missing]) or ("train",))

    async def _was_between(self, connection: RunConnection) -> bool:
        """Whether groups in the newest checkpoint are still marked on the server."""
        newest = max((self.folder / "checkpoints").glob("step-*"), key=_modified_ns)
        manifest = msgspec.json.decode((newest / MANIFEST).read_bytes(), type=Manifest)
        ends = read_contents(self.folder / "ledger.jsonl", manifest.progress.ledger_bytes).outcomes
        marked = await connection.read_hash("scored:marked")
        return any(prompt in ends for prompt in marked.values())


def _modified_ns(path: Path) -> int:
    """When a folder was changed last; 0 if the trainer has just removed it, as it does with old checkpoints."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _ended(status: RunStatus) -> int:
    return sum(n for name, n in status.prompt_counts.items() if name in {"trained", "dropped", "dead"})


def _kill_in_fsync(url: str, _data: Path) -> bool:
    """Kill the server during an `fsync`, while later writes exist in its memory alone.

    Returns False if no such moment came. Ballast makes the `fsync` long, as a busy neighbour would. Polls, because the
    server sends no event.
    """
    deadline = time.monotonic() + _FSYNC_S
    with Redis.from_url(url) as redis, suppress(RedisConnectionError):
        pid, ballast, written = redis.info("server")["process_id"], os.urandom(_BALLAST), 0.0
        while (now := time.monotonic()) < deadline:
            if now - written > _EVERYSEC_S:
                redis.set("ballast", ballast)
                written = now
            result = redis.info("persistence")
            if result["aof_pending_bio_fsync"] and result["aof_buffer_length"]:
                os.kill(pid, signal.SIGKILL)
                return True
    return False


def _cut_power(url: str, data: Path) -> bool:
    """Kill the server and cut the last second of writes from its file; returns False if it began another file."""
    with Redis.from_url(url) as redis, suppress(RedisConnectionError):
        pid = redis.info("server")["process_id"]
        before = {path: path.stat().st_size for path in data.rglob("*.incr.aof")}
        time.sleep(_EVERYSEC_S)
        os.kill(pid, signal.SIGSTOP)
        if before.keys() == set(data.rglob("*.incr.aof")):
            for path, size in before.items():
                os.truncate(path, size)
            os.kill(pid, signal.SIGKILL)
            return True
        os.kill(pid, signal.SIGCONT)
    return False


def processes() -> dict[str, set[int]]:
    """Return role -> pids of the live processes that the supervisor in this process has started."""
    result: dict[str, set[int]] = {}
    for child in psutil.Process().children():
        if role := _role(child):
            result.setdefault(role, set()).add(child.pid)
    return result


def _role(process: psutil.Process) -> str | None:
    """Return the role of a process; None if it is dead or has no role."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    if not words:
        return None
    if words[0].partition(" ")[0].endswith(("redis-server", "valkey-server")):  # the server rewrites its command line
        return SERVER
    for script, role in (("trainer.py", "train"), ("engine.py", "engine"), ("patient_rollout.py", "rollout")):
        if any(word.endswith((f"chaos/{script}", f"evaluation/{script}", f"faults/{script}")) for word in words):
            return role
    return words[words.index("penstock") + 1] if "penstock" in words else None
