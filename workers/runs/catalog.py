"""All runs that are here, each with its state, its last step and the last reward, from their folders alone."""

from collections.abc import Sequence
from pathlib import Path

from stream.errors import PenstockError
from workers.runs.find import open_run
from workers.runs.run import Run
from workers.runs.state import RunState
from workers.settings.settings import RUNS


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
        states = [run.state() for run in self.all()]
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
