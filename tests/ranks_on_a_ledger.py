"""A run trained from its books, by one process or by several ranks: `python tests/ranks_on_a_ledger.py CREWS`."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).parents[1]))

from stream.records import Group
from stream.trainer.archive import ArchivedGroups
from stream.trainer.ledger import read_ledger
from stream.trainer.outcomes import Trained
from tests.forked import ended, fork, import_ahead
from workers.settings import Settings
from workers.settings.toml_file import load_settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.distributed.ranks import Ranks, destroy_process_group, init_process_group
from workers.train.progress import Progress
from workers.train.rank_control.commands import RankCommands
from workers.train.rank_control.follower import run_follower
from workers.train.rank_control.rank0 import Rank0Learner
from workers.train.step.batch import collate
from workers.train.step.learner import Learner


class Job(Struct, frozen=True, kw_only=True):
    """Train on a ledger."""

    settings: str
    dtype: str = "float64"
    resume: str = ""
    """Folder of checkpoints; go on from the latest of them."""
    keep: str = ""
    """Folder of checkpoints that are kept."""
    keep_at: int = 0
    """After that step."""
    result: str = ""
    """File for what the learner ended with, if anybody wants it."""


def steps(folder: Path) -> Iterator[tuple[int, int, list[Group]]]:
    """Step, version and groups, as the ledger has them."""
    lines, broken = read_ledger(folder / "ledger.jsonl")
    assert not broken
    archive = ArchivedGroups(folder / "groups")
    for step, found in groupby(lines, lambda written: written.record.step):
        batch = [written.record for written in found if written.record.outcome == Trained()]
        yield step, batch[0].version, [archive.read(line.prompt, line.hash) for line in batch]


def work(job: Job, make_learner: Callable[[Settings, torch.dtype], Learner]) -> dict[str, torch.Tensor]:
    """Do a job; returns the learner's whole state."""
    settings = load_settings(Path(job.settings))
    learner = make_learner(settings, getattr(torch, job.dtype))
    done = 0
    if job.resume:
        found = CheckpointStore(Path(job.resume)).latest()
        assert found is not None
        found.restore(learner)
        done = found.progress.step
    for step, version, groups in steps(settings.folder):
        if step <= done:
            continue
        report = learner.step(collate(groups), version)
        assert report.trained
        if step == job.keep_at:
            CheckpointStore(Path(job.keep)).save(step, learner, Progress(step=step))
    ended = learner.state() | {f"weight.{name}": weight for name, weight in learner.weights().items()}
    if job.result:
        torch.save(ended, job.result)
    return ended


class Crew(Struct, frozen=True, kw_only=True):
    """Ranks that do jobs together, one after another."""

    size: int
    port: int
    """Where they meet."""
    jobs: list[Job]


def be(rank: int, crew: Crew) -> int:
    """Be a rank; returns the exit code."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(crew.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(crew.port),
    }
    if rank:
        return run_follower()
    init_process_group()
    orders = RankCommands(Ranks())
    for job in crew.jobs:
        work(job, lambda settings, dtype: Rank0Learner(settings, orders, dtype))
    orders.shut_down()
    destroy_process_group()
    return 0


def main() -> int:
    """Let crews work one after another, of processes that are forked from this one: what they all import is dear."""
    import_ahead()
    for crew in msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Crew]):
        ranks = [fork(partial(be, rank, crew)) for rank in range(crew.size)]
        if codes := [code for code in map(ended, ranks) if code]:
            return codes[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
