"""Kill processes of a run at random, and check from its weights whether anything was lost or trained twice.

    python -m tests.soak.kills --kills 100 --seed S --json
    python -m tests.soak.kills --kills 100 --server-kills 10 --fsync everysec --seed S --json

Prints where the prompts ended; exits with 1 if one was lost or trained twice, or the run did not finish.

A blow kills one or more processes at once. It falls at one of these moments, on a schedule made from a seed:

* `progress`: a fraction of the run is done, so that the whole schedule fits into a run on any machine;
* `soon`: shortly after the previous blow, whatever the run is doing, recovery included;
* `checkpoint`: a checkpoint's folder appears, before the trainer has acknowledged its groups;
* `fsync` (server only): during a background `fsync`, while later writes exist in memory alone;
* `power` (server only): as in a power failure, the last second of writes is cut from the server's file.
"""

import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.control import pause, resume
from stream.operator.status import RunStatus
from stream.trainer.ledger_records import read_contents
from tests.soak.audit import acquitted, audit
from tests.soak.ends import GROUP_SIZE
from tests.soak.project import ASKED, write_project
from tests.soak.recount import recount
from tests.soak.run import (
    SERVER,
    begin,
    conclude,
    count_ended,
    processes,
    run_parser,
    status_of,
    supervise,
    why_unfinished,
)
from workers.runs.live_run import read_live
from workers.settings import Settings
from workers.terminal.progress import choose_display
from workers.train.checkpointing.checkpoint import MANIFEST, Manifest

SLOTS = ("feed", "rollout", "rollout", "score", "score", "train", "engine")
_SIZES, _WEIGHTS = (1, 2, 3, len(SLOTS)), (60, 22, 12, 6)
_FIRST, _LAST = 0.03, 0.8
_LONGEST_SOON_S = 2.0
_SERVER_MOMENTS: tuple["When", ...] = ("fsync", "power", "checkpoint", "power", "progress")

When = Literal["progress", "soon", "checkpoint", "fsync", "power"]

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
class Blow:
    """One moment of the schedule."""

    when: When
    roles: tuple[str, ...]
    fraction: float = 0.0
    """Fraction of prompts that have ended before the blow falls."""
    delay_s: float = 0.0


def schedule(kills: int, seed: int, server_kills: int = 0) -> list[Blow]:
    """Return blows with `kills` kills of roles, every role once before any twice, and `server_kills` of the server."""
    chance = random.Random(seed)
    blows = _on_roles(kills, chance)
    for number in range(server_kills):
        blow = Blow(when=_SERVER_MOMENTS[number % len(_SERVER_MOMENTS)], roles=(SERVER,))
        # Never directly before a `soon` blow, which belongs to its predecessor.
        places = [place for place in range(len(blows) + 1) if place == len(blows) or blows[place].when != "soon"]
        blows.insert(chance.choice(places), blow)
    paced = [blow for blow in blows if blow.when != "soon"]
    for place, blow in enumerate(paced):
        blow.fraction = _FIRST + (_LAST - _FIRST) * (place + chance.random()) / len(paced)
    return blows


def _on_roles(kills: int, chance: random.Random) -> list[Blow]:
    bag: list[str] = []
    blows: list[Blow] = []
    while kills:
        if len(blows) % 4 == 1:
            blow = Blow(when="checkpoint", roles=("train",))
        else:
            size = min(kills, *chance.choices(_SIZES, _WEIGHTS))
            while len(bag) < size:
                bag = chance.sample(SLOTS, len(SLOTS)) + bag
            drawn = tuple(bag.pop() for _ in range(size))
            last = size == kills
            blow = Blow(when="soon" if blows and not last and chance.random() < 0.35 else "progress", roles=drawn)
            blow.delay_s = chance.uniform(0.0, _LONGEST_SOON_S if blow.when == "soon" else 0.2)
        blows.append(blow)
        kills -= len(blow.roles)
    return blows


@dataclass(kw_only=True)
class RoleKiller:
    """Carries out the schedule on a run in progress."""

    settings: Settings
    groups: int
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

    @property
    def _is_everysec(self) -> bool:
        return self.settings.queue.fsync == "everysec"

    async def run(self, connection: RunConnection) -> None:
        """Carry out all blows in order."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hold_back, connection)
            for place, blow in enumerate(self.blows):
                later = (after.fraction for after in self.blows[place + 1 :] if after.when != "soon")
                self.limit = next(later, 1.0) + _AHEAD
                await self._reached(blow.fraction, connection)
                await self._deal(blow, connection)
            # A server that lost writes may need a second `resume`.
            await self._reached(1.0, connection)
            tasks.cancel_scope.cancel()

    async def _hold_back(self, connection: RunConnection) -> None:
        """Pause the run while it is ahead of the schedule; otherwise it could end before its last kill."""
        while True:
            status = await self._look(connection)
            ahead = status is not None and count_ended(status) >= self.limit * self.groups
            if status is not None and ahead != bool(status.paused):
                with suppress(PenstockError):  # the run has finished
                    await (pause if ahead else resume)(connection, "kills")
            await connection.wait_for_change("$", 0.2)

    async def _deal(self, blow: Blow, connection: RunConnection) -> None:
        await anyio.sleep(blow.delay_s)
        if blow.when == "checkpoint":
            self.limit = math.inf  # a paused run would never write a checkpoint
            await self._checkpoint_appears()
        # With `always` the server does nothing else during `fsync`, and a power failure loses nothing.
        aimed = {"fsync": _kill_in_fsync, "power": _cut_power}.get(blow.when) if self._is_everysec else None
        if aimed is not None and await anyio.to_thread.run_sync(aimed, self.settings.folder):
            self.caught[blow.when] += 1
            self.killed[SERVER] += 1
        else:
            await self._strike(blow.roles)
        if blow.when == "checkpoint":
            self.between += await self._was_between(connection)

    async def _reached(self, fraction: float, connection: RunConnection) -> None:
        while (status := await self._look(connection)) is None or count_ended(status) < fraction * self.groups:
            await connection.wait_for_change("$", 0.5)

    async def _look(self, connection: RunConnection) -> RunStatus | None:
        """Read the run's status, and check that its account balances: at every moment, recoveries included."""
        if (status := await status_of(connection)) is None:
            return None
        self.looks += 1
        counts = status.prompt_counts
        if counts["fed"] != sum(n for name, n in counts.items() if name != "fed") or counts["fed"] > self.groups:
            self.unbalanced.append(counts)
        return status

    async def _checkpoint_appears(self) -> None:
        """Wait for a new checkpoint folder; polls, because the gap to hit is a few milliseconds wide."""
        folder = self.settings.folder / "checkpoints"

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
        newest = max((self.settings.folder / "checkpoints").glob("step-*"), key=_modified_ns)
        manifest = msgspec.json.decode((newest / MANIFEST).read_bytes(), type=Manifest)
        ends = read_contents(self.settings.folder / "ledger.jsonl", manifest.progress.ledger_bytes).outcomes
        marked = await connection.read_hash("scored:marked")
        return any(prompt in ends for prompt in marked.values())


def _modified_ns(path: Path) -> int:
    """When a folder was changed last; 0 if the trainer has just removed it, as it does with old checkpoints."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _kill_in_fsync(folder: Path) -> bool:
    """Kill the server during an `fsync`, while later writes exist in its memory alone.

    Returns False if no such moment came. Ballast makes the `fsync` long, as a busy neighbour would. Polls, because the
    server sends no event.
    """
    deadline = time.monotonic() + _FSYNC_S
    with _server_of(folder) as redis, suppress(RedisConnectionError):
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


def _cut_power(folder: Path) -> bool:
    """Kill the server and cut the last second of writes from its file; returns False if it began another file."""
    data = folder / "redis"
    with _server_of(folder) as redis, suppress(RedisConnectionError):
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


def _server_of(folder: Path) -> Redis:
    live = read_live(folder)
    assert live is not None
    return Redis.from_url(live.redis)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, kill, audit; returns the exit code."""
    parser = run_parser(__doc__, groups=2000, limit_s=900.0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--server-kills", type=int, default=0, help="of the Redis server, beside those")
    parser.add_argument("--fsync", choices=["always", "everysec"], default="everysec", help="the server's appendfsync")
    options = parser.parse_args(arguments)
    folder = begin(options, "kills")
    settings = write_project(folder, options.groups, options.seed, queue={"fsync": options.fsync})
    blows = schedule(options.kills, options.seed, options.server_kills)
    role_killer = RoleKiller(settings=settings, groups=options.groups, blows=blows)
    began = time.monotonic()
    outcome = supervise(settings, role_killer.run, limit_s=options.limit, display=choose_display(options.json))
    seconds = round(time.monotonic() - began, 1)
    verdict, second = audit(settings.folder, options.groups), recount(settings.folder, options.groups)
    report: dict[str, Any] = msgspec.to_builtins(verdict)
    report |= {"kills": dict(sorted(role_killer.killed.items())), "between": role_killer.between}
    report |= {"fsync": options.fsync, "caught": dict(role_killer.caught), "again": _again(settings.folder)}
    report |= {"looks": role_killer.looks, "unbalanced": role_killer.unbalanced[:5]}
    report |= {"recount": second, "seconds": seconds, "seed": options.seed}
    problem = why_unfinished(outcome)
    if not problem and not role_killer.kept:
        problem = "the run came to its end before everybody was killed who was to be; feed more with --groups"
    has_lost = not acquitted(verdict, options.groups) or second["lost"] or second["twice"]
    if not problem and (has_lost or role_killer.unbalanced):
        problem = "a prompt does not have its intended end once, or an account did not balance"
    return conclude(options, folder, report, problem)


def _again(folder: Path) -> dict[str, int]:
    """Count the groups trained again for lack of a checkpoint, and sampled again after worker or server died."""
    begun = [line for line in (folder / "logs" / "train-0.log").read_text().splitlines() if '"trainer.started"' in line]
    asked = Counter((folder / ASKED).read_text().split())
    return {
        "trained": sum(json.loads(line)["groups_again"] for line in begun),
        "sampled": sum(times > GROUP_SIZE for times in asked.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
