"""Add corrupt entries to all stages of a run in progress, under right and wrong prompt ids."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import anyio

from stream.connection.keys import STAGES, StageName
from stream.connection.run_connection import RunConnection, connect
from stream.errors import PenstockError, RecordError
from stream.operator.control import pause, resume
from stream.operator.status import read_status
from stream.queue.entry_scan import read_payload
from stream.queue.lease import Lease
from tests.fuzz.junk import BYTES, HEADER, TREES, seal, spoil_tree
from workers.runs.live_run import LiveRun, read_live

_FIRST, _LAST = 0.05, 0.7
"""Fractions of the prompts that have ended when the first and the last entries are added. The run is paused meanwhile,
so that good entries follow the last corrupt one: when the run finishes, it has read all of them.
"""
_AT_ONCE = 20


@dataclass(kw_only=True)
class Litterer:
    """Adds `entries` corrupt entries to a run in progress."""

    folder: Path
    """Folder of the run."""
    groups: int
    entries: int
    seed: int
    strewn: Counter[tuple[str, bytes]] = field(default_factory=Counter)
    """Entries added so far, by stage and payload."""

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)
        self._good: dict[str, bytes] = {}

    async def run(self) -> None:
        """Add all entries."""
        live = await self._live()
        async with connect(live.redis, live.run, create=False) as connection:
            while (done := self.strewn.total()) < self.entries:
                await self._reached(_FIRST + (_LAST - _FIRST) * done / self.entries, connection)
                await pause(connection, "litterer")
                await self._look_around(connection)
                for _ in range(min(_AT_ONCE, self.entries - done)):
                    await self._strew(connection)
                assert (await read_status(connection)).stages["prompts"].depth, (
                    "no good one is left to come behind these"
                )
                await resume(connection, "litterer")

    async def _live(self) -> LiveRun:
        while (live := read_live(self.folder)) is None or not live.engines:
            await anyio.sleep(0.02)
        return live

    async def _reached(self, fraction: float, connection: RunConnection) -> None:
        while True:
            try:
                counts = (await read_status(connection)).prompt_counts
            except PenstockError:  # no role has started
                await anyio.sleep(0.05)
                continue
            if counts["trained"] + counts["dropped"] + counts["dead"] >= fraction * self.groups:
                return
            await connection.wait_for_change("$", 1.0)

    async def _look_around(self, connection: RunConnection) -> None:
        """Collect some of the run's own records, by ids of unfinished prompts."""
        carried = list((await connection.read_hash("unfinished")).items())
        for name, where in self._chance.sample(carried, min(_AT_ONCE, len(carried))):
            stage, entry_id = where.split(":")
            for _, entry in await connection.redis.xrange(connection.key(stage), entry_id, entry_id):
                payload = entry.get(b"payload") or await read_payload(connection, stage, entry_id)
                if payload:  # else its entry has ended meanwhile
                    self._good[name] = payload
        for old in list(self._good)[: -2 * _AT_ONCE]:
            del self._good[old]

    async def _strew(self, connection: RunConnection) -> None:
        chance = self._chance
        stage = chance.choice(STAGES)
        (whose, payload), (another, other) = chance.sample(list(self._good.items()), 2)
        name: str | bytes | None = chance.choice((whose, whose, another, "nobody", "", b"\xff\xfe", None))
        kind = chance.random()
        if kind < 0.1:  # only its prompt id is wrong
            spoilt, name = payload, another if name == whose else name
        elif kind < 0.5:
            spoilt = chance.choice(BYTES)(payload, other, chance)
            if spoilt in (payload, other):
                return
        else:
            spoilt = seal(spoil_tree(payload[HEADER:], chance.choice(TREES), chance))
            if not _is_refused(stage, name, spoilt):
                return  # the changed record is still valid
        entry: dict[str | bytes, str | bytes] = {"payload": spoilt} | ({} if name is None else {"prompt": name})
        self.strewn[stage, spoilt] += 1
        await connection.redis.xadd(connection.key(stage), entry)


def _is_refused(stage: StageName, name: str | bytes | None, payload: bytes) -> bool:
    plain = name.decode(errors="replace") if isinstance(name, bytes) else name or ""
    lease = Lease(id="1-0", prompt_id=plain, payload=payload)
    try:
        lease.prompt() if stage == "prompts" else lease.group()
    except RecordError:
        return True
    return False
