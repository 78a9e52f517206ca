"""`penstock replay`: a run done again from ledger and archive, and compared with its checkpoints bit for bit."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec

from stream import parent_death as tether
from stream.errors import PenstockError
from workers.run.role_process import run_async
from workers.run.run_info import find_run
from workers.settings import Settings
from workers.settings.toml_file import load_settings
from workers.train.checkpointing.replay import ReplayReport, replay
from workers.train.checkpointing.replay_comparison import CheckpointMatch, ReplayMismatch
from workers.train.distributed.ranks import collective_timeout_s, rank_and_world_size


def show_replay(target: str | None, *, as_json: bool = False, command: Sequence[str] = ()) -> int:
    """Do a run again and print where it agrees. Returns the exit code: 1 where it came out otherwise.

    Args:
        target: the run.
        as_json: print one object.
        command: that starts this very process, for as many ranks as the run had to be started by.

    Raises:
        PenstockError: no such run, or it cannot be done again: groups are missing, or were altered.
    """
    rank, ranks = rank_and_world_size()
    if ranks > 1:
        tether.die_with_parent(os.getppid())  # each rank has a session of its own, which nobody else would end
    if rank:
        from workers.train.rank_control.follower import run_follower

        return run_follower()
    found = find_run(target, must_have_begun=False)
    if found.folder is None or found.settings is None:
        raise PenstockError(f"a replay of run {found.run!r} reads its files: name its folder, or its settings file")
    kept = found.folder / "run.toml"
    settings = load_settings(kept) if kept.is_file() else found.settings
    if settings.train.ranks > 1 and "RANK" not in os.environ:
        from workers.train.rank_control.launcher import launch_ranks

        collective_timeout_s()  # nonsense is told here once, not by each of them
        return launch_ranks(settings.train.ranks, command)
    report = _run_replay(settings, found.folder, _ignore_checkpoint if as_json else _print_checkpoint, ranks)
    if as_json:
        _print(msgspec.json.encode({"run": found.run} | msgspec.to_builtins(report)).decode())
    else:
        _print_report(report, kept)
    return 0 if report.is_identical else 1


def _run_replay(
    settings: Settings, folder: Path, on_checkpoint: Callable[[CheckpointMatch], None], ranks: int
) -> ReplayReport:
    """Alone, or as the first of so many ranks."""
    if ranks == 1:
        return replay(settings, folder, on_checkpoint)
    from workers.train.rank_control.commands import RankCommands
    from workers.train.rank_control.rank0 import Rank0Learner, run_with_followers

    async def lead(orders: RankCommands) -> ReplayReport:
        learner = partial(Rank0Learner, commands=orders)
        return await anyio.to_thread.run_sync(partial(replay, settings, folder, on_checkpoint, make_learner=learner))

    return run_async(partial(run_with_followers, lead))


def _print_report(report: ReplayReport, kept: Path) -> None:
    """The end of the report for people."""
    for note in report.notes:
        _print(f"note: {note}")
    if report.mismatch is None:
        _print(f"equal bit for bit after {report.steps:,} steps: {report.groups:,} groups, {report.dropped:,} dropped")
    else:
        _print(f"different: {_describe(report.mismatch)}")
        _print(f"(done with {kept} as it is now: where [train] was changed between, this is no wonder)")


def _describe(difference: ReplayMismatch) -> str:
    where = f"{difference.checkpoint}: " if difference.checkpoint else ""
    return f"step {difference.step}: {where}{difference.description}"


def _print_checkpoint(agreement: CheckpointMatch) -> None:
    _print(f"step {agreement.step}: {agreement.checkpoint} is equal ({agreement.tensors} tensors)")


def _ignore_checkpoint(_: CheckpointMatch) -> None:
    """In JSON all of them come at once."""


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201  (this is the command's output)
