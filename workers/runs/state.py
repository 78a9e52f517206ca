"""The state of a run, its last step and the last reward, from its folder alone."""

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

from stream.errors import PenstockError
from workers.runs.live_run import read_live
from workers.runs.summary import RunSummary, read_summary

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


def read_state(folder: Path | None, key: str, *, has_named_server: bool) -> RunState:
    """Describe a run by its folder alone. Blocks on files.

    Args:
        folder: of the run; None: only its server is known.
        key: of the run.
        has_named_server: its server was named to this process, so that no supervisor on this machine says how it is.
    """
    if folder is None:
        return RunState(key=key, folder="", state="running", detail="only its server is known")
    try:
        live = read_live(folder)
    except PenstockError as error:
        return RunState(key=key, folder=str(folder), state="unreadable", detail=str(error))
    summary = read_summary(folder)
    failure = summary.failure if summary else None
    if live is not None:
        state, detail = "running", f"process {live.pid}" + (f" on {live.host}" if live.host else "")
        if live.stopping:
            state, detail = "stopping", live.stopping
    elif summary is None and has_named_server:
        state, detail = "on a server", "its page says how it is"
    elif summary is None:
        state, detail = ("killed", "it ended without a summary") if (folder / "logs").is_dir() else ("not started", "")
    elif failure is not None:
        state, detail = "failed", failure.message
    else:
        state, detail = ("finished", summary.why_untrained) if summary.finished else ("stopped", "")
    step, reward = _last_step(folder / "metrics.jsonl")
    return RunState(
        key=key,
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
