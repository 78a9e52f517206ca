"""A run trained from its books, by one process or by several ranks: `python tests/ranks_on_a_ledger.py JOBS`.

The second form is one rank of several; the first of them does the jobs in the file JOBS, the others follow.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).parents[1]))

from stream.archive import ArchivedGroups
from stream.ledger import read_lines
from stream.records import Group
from workers.settings import Settings
from workers.settings.file import load
from workers.train.keeping.checkpoint import Checkpoints
from workers.train.keeping.progress import Progress
from workers.train.ranks.following import follow
from workers.train.ranks.leading import LeadingLearner
from workers.train.ranks.orders import Orders
from workers.train.ranks.ranks import Ranks, meet, part, place
from workers.train.step.batch import collate
from workers.train.step.learner import Learner


class Job(Struct, frozen=True, kw_only=True):
    """Train on a ledger."""

    settings: str
    dtype: str = "float64"
    checkpoints: str
    """Resume from the latest in there, if there is one."""
    keep_at: int = 0
    """Keep a checkpoint there after that step."""
    result: str = ""
    """File for what the learner ended with, if anybody wants it."""


def steps(folder: Path) -> Iterator[tuple[int, int, list[Group]]]:
    """Step, version and groups, as the ledger has them."""
    lines, broken = read_lines(folder / "ledger.jsonl")
    assert not broken
    archive = ArchivedGroups(folder / "groups")
    for step, found in groupby(lines, lambda written: written.line.step):
        batch = [written.line for written in found if written.line.end == "trained"]
        yield step, batch[0].version, [archive.read(line.prompt, line.hash) for line in batch]


def work(job: Job, make_learner: Callable[[Settings, torch.dtype], Learner]) -> dict[str, torch.Tensor]:
    """Do a job; returns the learner's whole state."""
    settings = load(Path(job.settings))
    learner = make_learner(settings, getattr(torch, job.dtype))
    checkpoints, done = Checkpoints(Path(job.checkpoints)), 0
    found = checkpoints.latest()
    if found is not None:
        found.restore(learner)
        done = found.progress.step
    for step, version, groups in steps(settings.folder):
        if step <= done:
            continue
        report = learner.step(collate(groups), version)
        assert report.trained
        if step == job.keep_at:
            checkpoints.save(step, learner, Progress(step=step))
    ended = learner.state() | {f"weight.{name}": weight for name, weight in learner.weights().items()}
    if job.result:
        torch.save(ended, job.result)
    return ended


def main() -> int:
    """Be a rank."""
    if place()[0]:
        return follow()
    meet()
    orders = Orders(Ranks())
    for job in msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Job]):
        work(job, lambda settings, dtype: LeadingLearner(settings, orders, dtype))
    orders.end()
    part()
    return 0


if __name__ == "__main__":
    sys.exit(main())
