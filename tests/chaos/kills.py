"""The hand that keeps a schedule of kills."""

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
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from stream.connection.run_connection import RunConnection, connect
from stream.errors import PenstockError
from stream.operator.run_control import pause, resume
from stream.operator.run_status import RunStatus, read_status
from stream.trainer.ledger import Ledger
from tests.chaos.schedule import SERVER, Blow
from workers.run.run_info import RunInfo, read_run_info
from workers.train.checkpointing.checkpoint import MANIFEST, Manifest

_ABSENT_S = 3.0
"""A role that is not back by then has nothing left to do; somebody else is killed in its place."""
_FSYNC_S = 5.0
"""So long for a server to be caught while it forces its file to the disk."""
_BALLAST = 48 * 1024 * 1024
_EVERYSEC_S = 1.0
"""So often it forces its file to the disk."""
_AHEAD = 0.02
"""The run may be so much further than the next blow; then it is paused, or it would end before its kills."""


@dataclass(kw_only=True)
class Executioner:
    """Keeps the schedule."""

    folder: Path
    """The run's."""
    groups: int
    fsync: str
    """The server's."""
    blows: list[Blow]
    killed: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)
    """Kills of the server that made it forget, by how."""
    between: int = 0
    """Kills when a checkpoint was durable and its groups not yet acknowledged."""
    limit: float = 0.0
    """How far the run may go for now, as a fraction of its prompts."""

    @property
    def kept(self) -> bool:
        """Everybody who was to be killed was."""
        return self.killed.total() == sum(len(blow.roles) for blow in self.blows)

    async def run(self) -> None:
        """Strike every blow."""
        live = await self._live()
        async with connect(live.redis, live.run, create=False) as connection, anyio.create_task_group() as tasks:
            tasks.start_soon(self._hold_back, connection)
            for place, blow in enumerate(self.blows):
                later = (after.fraction for after in self.blows[place + 1 :] if after.when != "soon")
                self.limit = next(later, 1.0) + _AHEAD
                await self._reached(blow.fraction, connection)
                await self._deal(blow, live, connection)
            # Whoever held it back may have to let it go twice: a server forgets.
            await self._reached(1.0, connection)
            tasks.cancel_scope.cancel()

    async def _hold_back(self, connection: RunConnection) -> None:
        """Pause the run where it is ahead of its kills, or it would come to its end before them."""
        while True:
            view = await self._look(connection)
            ahead = view is not None and _ended(view) >= self.limit * self.groups
            if view is not None and ahead != bool(view.paused):
                with suppress(PenstockError):  # it has finished
                    await (pause if ahead else resume)(connection, "chaos")
            await connection.wait_for_change("$", 0.2)

    async def _deal(self, blow: Blow, live: RunInfo, connection: RunConnection) -> None:
        await anyio.sleep(blow.delay_s)
        if blow.when == "checkpoint":
            self.limit = math.inf  # in a run that stands still none would ever come
            await self._checkpoint_appears()
        # With `always` it does nothing else while it forces its file, and no power that fails takes anything with it.
        aimed = {"fsync": _kill_in_fsync, "power": _cut_power}.get(blow.when) if self.fsync == "everysec" else None
        if aimed is not None and await anyio.to_thread.run_sync(aimed, live.redis, self.folder / "redis"):
            self.caught[blow.when] += 1
            self.killed[SERVER] += 1
        else:
            await self._strike(blow.roles)
        if blow.when == "checkpoint":
            self.between += await self._was_between(connection)

    async def _live(self) -> RunInfo:
        """Wait until the engine is there, and with it everybody."""
        while (live := read_run_info(self.folder)) is None or not live.engines:
            await anyio.sleep(0.02)
        return live

    async def _reached(self, fraction: float, connection: RunConnection) -> None:
        while (view := await self._look(connection)) is None or _ended(view) < fraction * self.groups:
            await connection.wait_for_change("$", 0.5)

    @staticmethod
    async def _look(connection: RunConnection) -> RunStatus | None:
        try:
            return await read_status(connection)
        except PenstockError:  # nobody has begun
            return None

    async def _checkpoint_appears(self) -> None:
        """Wait for a new folder. The one poll here: the gap to be hit is a few milliseconds wide."""
        folder = self.folder / "checkpoints"

        def names() -> set[str]:
            return {path.name for path in folder.glob("step-*")}

        before = names()
        while not names() - before:
            await anyio.sleep(0.0005)

    async def _strike(self, wanted: tuple[str, ...]) -> None:
        """Kill these roles' processes, all at once."""
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
        """Whether groups that the newest checkpoint holds are still marked on the server."""
        newest = max((self.folder / "checkpoints").glob("step-*"), key=lambda path: path.stat().st_mtime_ns)
        manifest = msgspec.json.decode((newest / MANIFEST).read_bytes(), type=Manifest)
        ends = Ledger.read_outcomes(self.folder / "ledger.jsonl", manifest.progress.ledger_bytes)
        marked = await connection.read_hash("scored:marked")
        return any(prompt in ends for prompt in marked.values())


def _ended(view: RunStatus) -> int:
    return sum(n for name, n in view.balance.items() if name in {"trained", "dropped", "dead"})


def _kill_in_fsync(url: str, _data: Path) -> bool:
    """Kill the server while it forces its file to the disk, and has been told things since that it only remembers.

    Returns False where it could not be caught. There has to be much to be forced, as if a neighbour had written it. A
    poll, since nothing tells.
    """
    deadline = time.monotonic() + _FSYNC_S
    with Redis.from_url(url) as redis, suppress(RedisConnectionError):
        pid, ballast, written = redis.info("server")["process_id"], os.urandom(_BALLAST), 0.0
        while (now := time.monotonic()) < deadline:
            if now - written > _EVERYSEC_S:
                redis.set("ballast", ballast)
                written = now
            found = redis.info("persistence")
            if found["aof_pending_bio_fsync"] and found["aof_buffer_length"]:
                os.kill(pid, signal.SIGKILL)
                return True
    return False


def _cut_power(url: str, data: Path) -> bool:
    """Kill the server, and take from its file what came in the last second; False where it began another file."""
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
    """Role -> pids of the processes that our supervisor, in this very process, has started and that are alive."""
    found: dict[str, set[int]] = {}
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            role = _role(Path(f"/proc/{pid}/cmdline"))
            if role:
                found.setdefault(role, set()).add(pid)
    return found


def _role(command_line: Path) -> str | None:
    """What a process does; None for one that is dead, or no role's."""
    try:
        words = command_line.read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if words[0].partition(" ")[0].endswith(("redis-server", "valkey-server")):  # it writes one line of its own there
        return SERVER
    for script, role in (("trainer.py", "train"), ("engine.py", "engine")):
        if any(word.endswith((f"chaos/{script}", f"evaluation/{script}")) for word in words):
            return role
    return words[words.index("workers") + 1] if "workers" in words else None
