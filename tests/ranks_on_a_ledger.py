"""Train a run from its ledger, with one process or several ranks: `python tests/ranks_on_a_ledger.py CREWS`."""

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
from stream.trainer.ledger_records import Trained, read_ledger
from tests.cases.norms import exact_norms
from tests.forked import ended, fork, import_ahead
from workers.runs.progress import Progress
from workers.settings import Settings
from workers.settings.toml_file import load_settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.rank_control.commands import RankCommands
from workers.train.rank_control.rank0 import Rank0Learner, run_follower
from workers.train.ranks import Ranks, destroy_process_group, init_process_group
from workers.train.step.batch import collate
from workers.train.step.learner import Learner


class Job(Struct, frozen=True, kw_only=True):
    """One training task on a ledger."""

    settings: str
    dtype: str = "float64"
    resume: str = ""
    """Folder of checkpoints; training resumes from the latest."""
    keep: str = ""
    """Folder in which to save a checkpoint."""
    keep_at: int = 0
    """Step after which to save it."""
    result: str = ""
    """File for the learner's final state; empty writes none."""


def steps(folder: Path) -> Iterator[tuple[int, int, list[Group]]]:
    """Yield step, version and groups, in the ledger's order."""
    lines, broken = read_ledger(folder / "ledger.jsonl")
    assert not broken
    archive = ArchivedGroups(folder / "groups")
    for step, result in groupby(lines, lambda written: written.record.step):
        batch = [written.record for written in result if written.record.outcome == Trained()]
        yield step, batch[0].version, [archive.read(line.prompt, line.hash) for line in batch]


def work(job: Job, make_learner: Callable[[Settings, torch.dtype], Learner]) -> dict[str, torch.Tensor]:
    """Carry out a job; returns the learner's whole state."""
    settings = load_settings(Path(job.settings))
    learner = make_learner(settings, getattr(torch, job.dtype))
    done = 0
    if job.resume:
        result = CheckpointStore(Path(job.resume)).latest()
        assert result is not None
        result.restore(learner)
        done = result.progress.step
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
    """Ranks that carry out jobs together, one after another."""

    size: int
    port: int
    """Port of the rendezvous."""
    jobs: list[Job]


def be(rank: int, crew: Crew) -> int:
    """Run one rank; returns the exit code."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(crew.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(crew.port),
    }
    exact_norms()
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
    """Run the crews one after another, in processes forked from this one: their imports are expensive."""
    import_ahead()
    for crew in msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Crew]):
        ranks = [fork(partial(be, rank, crew)) for rank in range(crew.size)]
        if codes := [code for code in map(ended, ranks) if code]:
            return codes[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
