"""All runs that are here, each with its state, its last step and the last reward, from their folders alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

from stream.errors import PenstockError
from workers.runs.find import open_run
from workers.runs.live_run import read_live
from workers.runs.run import Run
from workers.runs.summary import RunSummary, read_summary
from workers.settings.settings import RUNS

_TAIL_BYTES: Final = 65536


class _LastMetrics(Struct):
    step: int
    reward: float = field(name="reward/mean")


class RunState(Struct, frozen=True, kw_only=True):
    """What the folder of a run says about it, without its server."""

    key: str
    folder: str
    state: str
    """`running`, `stopping`, `finished`, `stopped` or `failed`; `killed` if it ended without a summary; `not started`;
    `on a server` that was named to this process; `unreadable`."""
    detail: str = ""
    started_at: float | None = None
    changed_at: float | None = None
    """Last change of its metrics, as Unix time in seconds."""
    step: int = 0
    """Its last step; 0 before the first."""
    reward: float | None = None
    """Mean reward of that step."""
    summary: RunSummary | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the folder says how the run ended."""
        return self.state in ("finished", "stopped", "failed", "killed")


class Runs:
    """The runs to look at: those that were named, or all below `runs/`.

    Args:
        targets: folders, settings files or names of runs; empty: every folder below `runs/`, also new ones.
        redis: URL of the server of runs that have no folder here.

    Raises:
        PenstockError: a target is no run.
    """

    def __init__(self, targets: Sequence[str] = (), redis: str = "") -> None:
        self._redis = redis
        self._named = bool(targets)
        self._runs: dict[str, Run] = {}
        for target in targets:
            self._add(target)

    def all(self) -> list[Run]:
        """Return all runs. Blocks on files."""
        if not self._named:
            for key in [key for key, run in self._runs.items() if not run.file("run.toml").is_file()]:
                del self._runs[key]  # its folder was removed
            for file in sorted(RUNS.glob("*/run.toml")):
                if file.parent.name not in self._runs and (run := self._open(file.parent)) is not None:
                    self._runs[file.parent.name] = run
        return list(self._runs.values())

    def states(self) -> list[RunState]:
        """Return the state of each run: those that run first, then the newest. Blocks on files."""
        states = [read_state(run) for run in self.all()]
        return sorted(
            states,
            key=lambda run: (run.state not in ("running", "stopping"), -(run.changed_at or run.started_at or 0.0)),
        )

    def find(self, key: str) -> Run | None:
        """Return the run with this key; None if there is none. Blocks on files."""
        if key not in self._runs:
            self.all()
        return self._runs.get(key)

    def _open(self, folder: Path) -> Run | None:
        """Return the run in a folder, whose settings may be broken; None if it is gone again."""
        try:
            return open_run(folder, self._redis)
        except PenstockError:
            return Run(folder.name, folder, self._redis) if folder.is_dir() else None

    def _add(self, target: str) -> None:
        run = open_run(target, self._redis)
        key, number = run.key, 2
        while key in self._runs:
            key, number = f"{run.key}~{number}", number + 1
        run.key = key
        self._runs[key] = run


def read_state(run: Run) -> RunState:
    """Describe a run by its folder alone. Blocks on files."""
    folder = run.folder
    if folder is None:
        return RunState(key=run.key, folder="", state="running", detail="only its server is known")
    try:
        live = read_live(folder)
    except PenstockError as error:
        return RunState(key=run.key, folder=str(folder), state="unreadable", detail=str(error))
    summary = read_summary(folder)
    failure = summary.failure if summary else None
    if live is not None:
        state, detail = "running", f"process {live.pid}" + (f" on {live.host}" if live.host else "")
        if live.stopping:
            state, detail = "stopping", live.stopping
    elif summary is None and run.has_named_server:
        state, detail = "on a server", "its page says how it is"
    elif summary is None:
        state, detail = ("killed", "it ended without a summary") if (folder / "logs").is_dir() else ("not started", "")
    elif failure is not None:
        state, detail = "failed", failure.message
    else:
        state, detail = ("finished", summary.verdict) if summary.finished else ("stopped", "")
    step, reward = _last_step(folder / "metrics.jsonl")
    return RunState(
        key=run.key,
        folder=str(folder),
        state=state,
        step=step,
        reward=reward,
        detail=detail,
        started_at=_changed_at(folder / "identity.json"),
        changed_at=_changed_at(folder / "metrics.jsonl"),
        summary=summary,
    )


def _last_step(path: Path) -> tuple[int, float | None]:
    """Return number and mean reward of the last step in a run's metrics; 0 and None if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0, None
    for line in reversed(lines):
        try:
            metrics = msgspec.json.decode(line, type=_LastMetrics)
        except ValueError:  # the first line is a part of one, a crash may have cut the last, and some have no reward
            continue
        return metrics.step, metrics.reward
    return 0, None


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
