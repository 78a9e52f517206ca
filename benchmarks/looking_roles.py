"""Processes of a run that `looking.py` measures.

    python -m benchmarks.looking_roles rollout|score run.toml ...   the role, with a switch for its in-flight reports
    python -m benchmarks.looking_roles feed CASE.json URL RUN       feeds the conversations of the case, again and again
    python -m benchmarks.looking_roles trainer FOLDER URL RUN       trains nothing: claims, commits, checkpoints

SIGRTMIN switches the reports off, SIGRTMIN+1 on.
"""

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio

from benchmarks.rollout import feed
from stream.connection.run_connection import connect
from stream.queue.in_flight import GroupInFlight
from stream.queue.lease import Lease
from stream.trainer.consume import consume
from stream.trainer.leased_group import ResumePoint
from workers.cli import penstock
from workers.role.in_flight_reporter import InFlightReporter

BATCH, SAVE_EVERY = 8, 4


def add_switch() -> None:
    """Let signals switch the reports of leases off and on."""
    describe, is_on = InFlightReporter._describe, [True]

    def describe_if_on(self: InFlightReporter, leases: Mapping[str, Lease]) -> list[GroupInFlight]:
        return describe(self, leases) if is_on[0] else []

    InFlightReporter._describe = describe_if_on
    for number, value in ((signal.SIGRTMIN, False), (signal.SIGRTMIN + 1, True)):
        signal.signal(number, lambda _number, _frame, value=value: is_on.__setitem__(0, value))


def save(_: ResumePoint) -> None:
    """Write no checkpoint: what is measured is the work on streams."""


async def train(folder: str, url: str, run: str) -> None:
    """Do everything of a trainer but the training."""
    async with connect(url, run) as connection, consume(connection, Path(folder) / "ledger.jsonl") as consumer:
        await consumer.publish("none", 0, lambda _version: None)
        step = 0
        while groups := await consumer.claim(BATCH):
            step += 1
            await consumer.commit(groups, step)
            if step % SAVE_EVERY == 0:
                await consumer.checkpoint(save)


def main() -> None:
    """Run one of them."""
    role, *arguments = sys.argv[1:]
    if role == "trainer":
        anyio.run(train, *arguments, backend_options={"use_uvloop": True})
    elif role == "feed":
        case = json.loads(Path(arguments[0]).read_text())
        anyio.run(feed, *arguments[1:], case["conversations"], backend_options={"use_uvloop": True})
    else:
        add_switch()
        penstock(prog_name="penstock")


if __name__ == "__main__":
    main()
