"""Add corrupt entries to a run in progress, and check that each becomes one dead letter and has no other effect.

    python -m tests.soak.foreign_entries --entries 2000 --seed S --json

The entries come to all stages, under right and wrong prompt ids. Nothing is killed, so no role may start a second time.
Exits with 1 if one did, if a corrupt entry is not exactly one dead letter, or if a good prompt does not have its
intended end.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from stream.connection.keys import STAGES, StageName
from stream.connection.run_connection import RunConnection
from stream.errors import RecordError
from stream.operator.control import pause, resume
from stream.operator.dead_letters import DeadLetter, list_dead_letters
from stream.operator.status import read_status
from stream.queue.entry_scan import read_payload
from stream.queue.lease import Lease
from tests.soak.audit import acquitted, audit
from tests.soak.corruption import BYTES, HEADER, TREES, seal, spoil_tree
from tests.soak.project import write_project
from tests.soak.run import begin, conclude, count_events, run_parser, supervise, wait_ended, why_unfinished
from workers.runs.find import open_run
from workers.terminal.progress import choose_display

_FIRST, _LAST = 0.05, 0.7
"""Fractions of the prompts that have ended when the first and the last entries are added. The run is paused meanwhile,
so that good entries follow the last corrupt one: when the run finishes, it has read all of them.
"""
_AT_ONCE = 20


class ForeignEntries:
    """Corrupt entries that are added to a run in progress."""

    def __init__(self, groups: int, entries: int, seed: int) -> None:
        self.added: Counter[tuple[str, bytes]] = Counter()
        """Entries added so far, by stage and payload."""
        self._groups, self._entries = groups, entries
        self._chance = Random(seed)
        self._good: dict[str, bytes] = {}

    async def run(self, connection: RunConnection) -> None:
        """Add all entries."""
        while (done := self.added.total()) < self._entries:
            await wait_ended(connection, (_FIRST + (_LAST - _FIRST) * done / self._entries) * self._groups)
            await pause(connection, "foreign")
            await self._collect_records(connection)
            for _ in range(min(_AT_ONCE, self._entries - done)):
                await self._add_one(connection)
            left = (await read_status(connection)).stages["prompts"].depth
            assert left, "no good one is left to come behind these"
            await resume(connection, "foreign")

    async def _collect_records(self, connection: RunConnection) -> None:
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

    async def _add_one(self, connection: RunConnection) -> None:
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
        self.added[stage, spoilt] += 1
        await connection.redis.xadd(connection.key(stage), entry)


def _is_refused(stage: StageName, name: str | bytes | None, payload: bytes) -> bool:
    plain = name.decode(errors="replace") if isinstance(name, bytes) else name or ""
    lease = Lease(id="1-0", prompt_id=plain, payload=payload)
    try:
        lease.prompt() if stage == "prompts" else lease.group()
    except RecordError:
        return True
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, add entries, audit; returns the exit code."""
    parser = run_parser(__doc__, groups=1000, limit_s=900.0)
    parser.add_argument("--entries", type=int, default=2000, help="corrupt ones")
    options = parser.parse_args(arguments)
    folder = begin(options, "foreign")
    settings = write_project(folder, options.groups, options.seed)
    foreign_entries = ForeignEntries(options.groups, options.entries, options.seed)
    began = time.monotonic()
    outcome = supervise(settings, foreign_entries.run, limit_s=options.limit, display=choose_display(options.json))
    seconds = round(time.monotonic() - began, 1)
    verdict = audit(settings.folder, options.groups)
    letters = [letter for letter in open_run(settings.folder).call(_letters) if not letter.ends_prompt]
    restarts = count_events(settings.folder, "role.restarted")
    report: dict[str, Any] = msgspec.to_builtins(verdict)
    report |= {"strewn": foreign_entries.added.total(), "dead_letters_of_junk": len(letters), "restarts": restarts}
    report |= {"by_stage": dict(Counter(stage for stage, _ in foreign_entries.added.elements()))}
    report |= {"reasons": dict(Counter(letter.reason for letter in letters)), "seconds": seconds, "seed": options.seed}
    problem = why_unfinished(outcome)
    buried = Counter((letter.stage, letter.payload) for letter in letters)
    if not problem and (restarts or buried != foreign_entries.added or not acquitted(verdict, options.groups)):
        problem = "a role restarted, or a corrupt entry or a prompt does not have its intended end"
    return conclude(options, folder, report, problem)


async def _letters(connection: RunConnection) -> list[DeadLetter]:
    return await list_dead_letters(connection, count=1_000_000)


if __name__ == "__main__":
    sys.exit(main())
