"""`penstock replay`: train a run's groups again and compare the weights with its checkpoints, bit for bit."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec

from stream.parent_death import die_with_parent
from workers.launch.process import run_async
from workers.role.exit_codes import ExitCode
from workers.runs.run import Run
from workers.terminal.output import print_json, print_line
from workers.train.checkpointing.replayer import CheckpointMatch, Replayer, ReplayReport
from workers.train.ranks import collective_timeout_s, rank_and_world_size


def show_replay(run: Run, *, as_json: bool = False, command: Sequence[str] = ()) -> int:
    """Replay a run and print the comparison. Returns the exit code: 1 if the weights differ.

    Args:
        run: the run.
        as_json: print one JSON object, which contains all matches.
        command: command line that starts each further rank.

    Raises:
        PenstockError: groups are missing from its archive or were changed.
    """
    rank, world_size = rank_and_world_size()
    if world_size > 1:
        die_with_parent(os.getppid())  # each rank has its own session, so no signal to the parent's group ends it
    if rank:
        from workers.train.rank_control.rank0 import run_follower

        return run_follower()
    settings, folder = run.files("a replay")
    if settings.train.ranks > 1 and "RANK" not in os.environ:
        from workers.train.rank_control.launcher import launch_ranks

        collective_timeout_s()  # report an invalid value here once, not in every rank
        return launch_ranks(settings.train.ranks, command)
    make_replayer = partial(Replayer, settings, folder, (lambda _: None) if as_json else _print_checkpoint)
    report = make_replayer().run() if world_size == 1 else _replay_on_ranks(make_replayer)
    if as_json:
        print_json({"run": run.name} | msgspec.to_builtins(report))
    else:
        _print_report(report, folder / "run.toml")
    return ExitCode.SUCCESS if report.is_identical else ExitCode.FAILURE


def _replay_on_ranks(make_replayer: Callable[..., Replayer]) -> ReplayReport:
    """Replay as rank 0 of several."""
    from workers.train.rank_control.commands import RankCommands
    from workers.train.rank_control.rank0 import Rank0Learner, run_with_followers

    async def lead(commands: RankCommands) -> ReplayReport:
        learner = partial(Rank0Learner, commands=commands)
        return await anyio.to_thread.run_sync(lambda: make_replayer(make_learner=learner).run())

    return run_async(partial(run_with_followers, lead))


def _print_report(report: ReplayReport, settings_file: Path) -> None:
    for note in report.notes:
        print_line(f"note: {note}")
    if (mismatch := report.mismatch) is None:
        print_line(
            f"equal bit for bit after {report.steps:,} steps: {report.groups:,} groups, {report.dropped:,} dropped"
        )
    else:
        where = f"{mismatch.checkpoint}: " if mismatch.checkpoint else ""
        print_line(f"different: step {mismatch.step}: {where}{mismatch.description}")
        print_line(f"(replayed with {settings_file} as it is now; a changed [train] explains a difference)")


def _print_checkpoint(match: CheckpointMatch) -> None:
    print_line(f"step {match.step}: {match.checkpoint} is equal ({match.tensors} tensors)")
