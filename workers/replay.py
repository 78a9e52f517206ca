"""`penstock replay`: a run done again from ledger and archive, and compared with its checkpoints bit for bit."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec

from stream import tether
from stream.errors import PenstockError
from workers.process import run_loop
from workers.run.live import locate
from workers.settings import Settings
from workers.settings.file import load
from workers.train.keeping.agreement import Agreement, Difference
from workers.train.keeping.replay import ReplayReport, replay
from workers.train.ranks.ranks import patience_s, place


def show_replay(target: str | None, *, as_json: bool = False, command: Sequence[str] = ()) -> int:
    """Do a run again and print where it agrees. Returns the exit code: 1 where it came out otherwise.

    Args:
        target: the run.
        as_json: print one object.
        command: that starts this very process, for as many ranks as the run had to be started by.

    Raises:
        PenstockError: no such run, or it cannot be done again: groups are missing, or were altered.
    """
    rank, ranks = place()
    if ranks > 1:
        tether.tie(os.getppid())  # each rank has a session of its own, which nobody else would end
    if rank:
        from workers.train.ranks.following import follow

        return follow()
    found = locate(target, begun=False)
    if found.folder is None or found.settings is None:
        raise PenstockError(f"a replay of run {found.run!r} reads its files: name its folder, or its settings file")
    kept = found.folder / "run.toml"
    settings = load(kept) if kept.is_file() else found.settings
    if settings.train.ranks > 1 and "RANK" not in os.environ:
        from workers.train.ranks.launching import launch_ranks

        patience_s()  # nonsense is told here once, not by each of them
        return launch_ranks(settings.train.ranks, command)
    report = _replayed(settings, found.folder, _quiet if as_json else _tell, ranks)
    if as_json:
        _print(msgspec.json.encode({"run": found.run} | msgspec.to_builtins(report)).decode())
    else:
        _show(report, kept)
    return 0 if report.equal else 1


def _replayed(settings: Settings, folder: Path, tell: Callable[[Agreement], None], ranks: int) -> ReplayReport:
    """Alone, or as the first of so many ranks."""
    if ranks == 1:
        return replay(settings, folder, tell)
    from workers.train.ranks.leading import LeadingLearner, together
    from workers.train.ranks.orders import Orders

    async def lead(orders: Orders) -> ReplayReport:
        learner = partial(LeadingLearner, orders=orders)
        return await anyio.to_thread.run_sync(partial(replay, settings, folder, tell, make_learner=learner))

    return run_loop(partial(together, lead))


def _show(report: ReplayReport, kept: Path) -> None:
    """The end of the report for people."""
    for note in report.notes:
        _print(f"note: {note}")
    if report.difference is None:
        _print(f"equal bit for bit after {report.steps:,} steps: {report.groups:,} groups, {report.dropped:,} dropped")
    else:
        _print(f"different: {_told(report.difference)}")
        _print(f"(done with {kept} as it is now: where [train] was changed between, this is no wonder)")


def _told(difference: Difference) -> str:
    where = f"{difference.checkpoint}: " if difference.checkpoint else ""
    return f"step {difference.step}: {where}{difference.what}"


def _tell(agreement: Agreement) -> None:
    _print(f"step {agreement.step}: {agreement.checkpoint} is equal ({agreement.tensors} tensors)")


def _quiet(_: Agreement) -> None:
    """In JSON all of them come at once."""


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201  (this is the command's output)
