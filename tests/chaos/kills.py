"""Who is killed when: a seeded schedule, and the hand that keeps it.

A blow kills one process or several at once. It falls when so much of the run is done, so that the whole schedule fits
into a run on any machine; or soon after the blow before it, whatever the run is doing then, recovery included; or at
the moment at which a checkpoint's folder appears, before the trainer has acknowledged what is in it.
"""

import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import msgspec

from stream.errors import PenstockError
from stream.ledger import Ledger
from stream.link import Link, connect
from stream.view import look
from workers.run.live import Live, read
from workers.train.checkpoint import MANIFEST, Manifest

SLOTS = ("feed", "rollout", "rollout", "score", "score", "train", "engine")
_SIZES, _WEIGHTS = (1, 2, 3, len(SLOTS)), (60, 22, 12, 6)
_FIRST, _LAST = 0.03, 0.8
_LONGEST_SOON_S = 2.0
_ABSENT_S = 3.0
"""A role that is not back by then has nothing left to do; somebody else is killed in its place."""

When = Literal["progress", "soon", "checkpoint"]


@dataclass(kw_only=True)
class Blow:
    """One moment of the schedule."""

    when: When
    roles: tuple[str, ...]
    fraction: float = 0.0
    """Of prompts that have met their end; not before that."""
    delay_s: float = 0.0


def schedule(kills: int, seed: int) -> list[Blow]:
    """So many kills, in blows; every role has its turn before any has a second one."""
    chance = random.Random(seed)
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
    paced = [blow for blow in blows if blow.when != "soon"]
    for place, blow in enumerate(paced):
        blow.fraction = _FIRST + (_LAST - _FIRST) * (place + chance.random()) / len(paced)
    return blows


@dataclass(kw_only=True)
class Executioner:
    """Keeps the schedule."""

    folder: Path
    """The run's."""
    groups: int
    blows: list[Blow]
    killed: Counter[str] = field(default_factory=Counter)
    between: int = 0
    """Trainers that were killed when a checkpoint was durable and its groups not yet acknowledged."""

    @property
    def kept(self) -> bool:
        """Everybody who was to be killed was."""
        return self.killed.total() == sum(len(blow.roles) for blow in self.blows)

    async def run(self) -> None:
        """Strike every blow."""
        live = await self._live()
        async with connect(live.redis, live.run, create=False) as link:
            for blow in self.blows:
                await self._reached(blow.fraction, link)
                await anyio.sleep(blow.delay_s)
                if blow.when == "checkpoint":
                    await self._checkpoint_appears()
                await self._strike(blow.roles)
                if blow.when == "checkpoint":
                    self.between += await self._was_between(link)

    async def _live(self) -> Live:
        """Wait until the engine is there, and with it everybody."""
        while (live := read(self.folder)) is None or not live.engines:
            await anyio.sleep(0.02)
        return live

    async def _reached(self, fraction: float, link: Link) -> None:
        while True:
            try:
                balance = (await look(link)).balance
            except PenstockError:  # nobody has begun
                await anyio.sleep(0.05)
                continue
            if balance["trained"] + balance["dropped"] + balance["dead"] >= fraction * self.groups:
                return
            await link.wait("$", 1.0)

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
            others = [role for role, pids in processes().items() for _ in pids - chosen.keys()]
            await self._strike(tuple(others[:missing]) or ("train",))

    async def _was_between(self, link: Link) -> bool:
        """Whether groups that the newest checkpoint holds are still marked on the server."""
        newest = max((self.folder / "checkpoints").glob("step-*"), key=lambda path: path.stat().st_mtime_ns)
        manifest = msgspec.json.decode((newest / MANIFEST).read_bytes(), type=Manifest)
        ends = Ledger.read(self.folder / "ledger.jsonl", manifest.progress.ledger_bytes)
        marked = await link.read_hash("scored:ended")
        return any(prompt in ends for prompt in marked.values())


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
    for script, role in (("trainer.py", "train"), ("engine.py", "engine")):
        if any(word.endswith(f"chaos/{script}") for word in words):
            return role
    return words[words.index("workers") + 1] if "workers" in words else None
