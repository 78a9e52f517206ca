"""The runs that a dashboard shows, each with its folder and, while it has one, its server."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio.to_thread
import msgspec
from msgspec import Struct, field

from stream.connection.run_connection import RunConnection, connect
from stream.errors import PenstockError
from workers.run.run_folder import RUNS
from workers.run.run_info import RunLocation, find_run, read_run_info
from workers.run.summary import RunSummary, read_summary
from workers.settings import Settings
from workers.settings.secrets import REDIS, read_secret
from workers.settings.toml_file import load_settings

_TAIL_BYTES: Final = 65536
_CONNECT_S: Final = 2.0
"""Seconds to try to reach a run's server; the page then says that it does not answer."""


class NoServerError(PenstockError):
    """The run has no server at present; its folder can be read all the same."""


class RunSource:
    """One run.

    Args:
        key: its part of the page's address.
        target: folder, settings file or name of the run.
        folder: of the run; None: only its server is known.
        redis: URL of its server; empty: its files name it.
    """

    def __init__(self, key: str, target: str, folder: Path | None, redis: str = "") -> None:
        self.key = key
        self.folder = folder
        self.has_server_url = bool(redis or read_secret(REDIS))
        """Whether its server was named when the dashboard was started: no supervisor on this machine says how it is."""
        self._target = target
        self._redis = redis

    def locate(self) -> RunLocation:
        """Return where the run is at this moment. Blocks on files.

        Raises:
            PenstockError: there is no such run any more.
        """
        return find_run(self._target, self._redis, must_have_begun=False)

    def file(self, *parts: str) -> Path:
        """Return the path of a file in the run's folder; it does not exist if only the server is known."""
        return (self.folder or Path("/nonexistent")).joinpath(*parts)

    def settings(self) -> Settings | None:
        """Return the settings of the run's last start; None if only the server is known. Blocks on files.

        Raises:
            PenstockError: there is no such run any more.
        """
        saved = self.file("run.toml")
        return load_settings(saved) if saved.is_file() else self.locate().settings

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[RunConnection]:
        """Connect to the run's server, without creating keys.

        Raises:
            NoServerError: the run's private server is stopped.
            PenstockError: the server does not answer.
        """
        location = await anyio.to_thread.run_sync(self.locate)
        if not location.url:
            raise NoServerError("the run's private server does not run; figures come from the run's folder")
        async with connect(location.url, location.run, reconnect_s=_CONNECT_S, create=False) as connection:
            with connection.explained_refusals():
                yield connection


class _LastMetrics(Struct):
    step: int
    reward: float = field(name="reward/mean")


class RunOverview(Struct, frozen=True, kw_only=True):
    """What the folder of a run says about it, without its server."""

    key: str
    folder: str
    state: str
    """`running`, `finished`, `stopped` or `failed`; `killed` if it ended without a summary; `not started`;
    `on a server` that was named when the dashboard was started; `unreadable`."""
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


class RunCatalog:
    """The runs of one dashboard: those named when it was started, or all below `runs/`.

    Args:
        targets: folders, settings files or names of runs; empty: every folder below `runs/`, also new ones.
        redis: URL of the server of runs that have no folder here.

    Raises:
        PenstockError: a target is no run.
    """

    def __init__(self, targets: Sequence[str] = (), redis: str = "") -> None:
        self._redis = redis
        self._named = bool(targets)
        self._sources: dict[str, RunSource] = {}
        for target in targets:
            self._add(target)

    def sources(self) -> list[RunSource]:
        """Return all runs. Blocks on files."""
        if not self._named:
            for key in [key for key, source in self._sources.items() if not source.file("run.toml").is_file()]:
                del self._sources[key]  # its folder was removed
            known = set(self._sources)
            for file in sorted(RUNS.glob("*/run.toml")):
                if file.parent.name not in known:
                    self._sources[file.parent.name] = RunSource(
                        file.parent.name, str(file.parent), file.parent, self._redis
                    )
        return list(self._sources.values())

    def find(self, key: str) -> RunSource | None:
        """Return the run with this key; None if there is none. Blocks on files."""
        if key not in self._sources:
            self.sources()
        return self._sources.get(key)

    def _add(self, target: str) -> None:
        location = find_run(target, self._redis, must_have_begun=False)
        name = location.folder.resolve().name if location.folder else location.run
        key, number = name, 2
        while key in self._sources:
            key, number = f"{name}~{number}", number + 1
        self._sources[key] = RunSource(key, target, location.folder, self._redis)


def read_overview(source: RunSource) -> RunOverview:
    """Describe a run by its folder alone. Blocks on files."""
    folder = source.folder
    if folder is None:
        return RunOverview(key=source.key, folder="", state="running", detail="only its server is known")
    try:
        live = read_run_info(folder)
    except PenstockError as error:
        return RunOverview(key=source.key, folder=str(folder), state="unreadable", detail=str(error))
    summary = read_summary(folder)
    failure = summary.failure if summary else None
    if live is not None:
        state, detail = "running", f"process {live.pid}" + (f" on {live.host}" if live.host else "")
    elif summary is None and source.has_server_url:
        state, detail = "on a server", "its page says how it is"
    elif summary is None:
        state, detail = ("killed", "it ended without a summary") if (folder / "logs").is_dir() else ("not started", "")
    elif failure is not None:
        state, detail = "failed", failure.message
    else:
        state, detail = ("finished", summary.verdict) if summary.finished else ("stopped", "")
    step, reward = _last_step(folder / "metrics.jsonl")
    return RunOverview(
        key=source.key,
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
