"""Final numbers of a run, which must balance: `fed = trained + dropped + dead + outstanding`."""

from pathlib import Path

import msgspec
from msgspec import Struct, field

from stream.causes import ErrorCause
from stream.errors import RunFailedError
from stream.operator.run_status import RunStatus
from workers.runs.progress import GroupTotals, Progress


class _File(Struct):
    size: int


class _Manifest(Struct):
    """The fields of a checkpoint's manifest that the summary reads."""

    progress: Progress
    saved_at: str = ""
    files: dict[str, _File] = field(default_factory=dict)


class Staleness(Struct, frozen=True):
    """Policy versions between sampling and training a token; None if no token was trained."""

    mean: float | None = None
    max: float | None = None


class FailureReport(Struct, frozen=True, kw_only=True):
    """Why a run failed."""

    message: str
    cause: ErrorCause | None = None
    """The exception behind it, with its place in the user's code, if it is known."""


class RunSummary(Struct, kw_only=True):
    """Content of `summary.json`. Counts are over the whole run; seconds and speed are over its last start."""

    finished: bool = False
    """The run has done its work: it was not stopped and did not fail."""
    steps: int
    groups_trained: int
    groups_dropped: dict[str, int]
    """Dropped groups by reason."""
    completion_states: dict[str, int]
    """Completions by final state: `valid`, or the reason why not."""
    score_before: float | None = None
    score_after: float | None = None
    """Mean reward on held-out prompts; None if not measured."""
    staleness: Staleness
    tokens_per_second: float
    """Trained sampled tokens per second of wall time."""
    seconds: float
    fed: int
    outstanding: int
    """Unfinished prompts."""
    dead: int
    duplicates: int
    rejected_rows: int = 0
    """Rows of the data that are no prompts, once for each epoch; they were not fed."""
    totals: GroupTotals = field(default_factory=GroupTotals)
    """Rewards, tool calls and truncations of all groups that were trained or dropped."""
    causes: dict[str, ErrorCause] = field(default_factory=dict)
    """The last exception for each completion state but `valid`, for a tool's error (`tool_error`), and for dead letters
    (`dead:REASON`)."""
    verdict: str = ""
    """Why the run cannot have learned anything; empty if it can have."""
    failure: FailureReport | None = None

    @property
    def is_balanced(self) -> bool:
        """Whether every fed prompt is accounted for."""
        return self.fed == self.groups_trained + sum(self.groups_dropped.values()) + self.dead + self.outstanding

    @property
    def balance(self) -> str:
        """The balance as an equation in words."""
        return (
            f"{self.fed} fed {'=' if self.is_balanced else '≠'} {self.groups_trained} trained + "
            f"{sum(self.groups_dropped.values())} dropped + {self.dead} dead + {self.outstanding} outstanding"
        )


def summarize(
    view: RunStatus, before: Progress, after: Progress, seconds: float, failure: RunFailedError | None = None
) -> RunSummary:
    """Summarize a run.

    Args:
        view: the run's last status.
        before: progress in the latest checkpoint when the run was last started.
        after: progress in the latest checkpoint now.
        seconds: wall time since that start.
        failure: error that ended the run, if one did.
    """
    count = after.staleness_count
    staleness = Staleness(after.staleness_sum / count, after.staleness_max) if count else Staleness()
    return RunSummary(
        steps=after.step,
        groups_trained=view.balance["trained"],
        groups_dropped=view.dropped,
        completion_states=after.completion_states,
        staleness=staleness,
        tokens_per_second=round(max(0, after.tokens - before.tokens) / seconds, 1),
        seconds=round(seconds, 3),
        fed=view.balance["fed"],
        outstanding=view.balance["outstanding"],
        dead=view.balance["dead"],
        duplicates=view.counts.get("duplicates", 0),
        rejected_rows=int(view.feed.get("rejected_rows", 0)),
        totals=after.totals,
        causes=after.causes,
        failure=FailureReport(message=str(failure), cause=failure.cause) if failure is not None else None,
    )


def read_summary(folder: Path) -> RunSummary | None:
    """Return the content of `summary.json`; None without a readable one."""
    try:
        return msgspec.json.decode((folder / "summary.json").read_bytes(), type=RunSummary)
    except (OSError, ValueError):
        return None


def has_finished(folder: Path) -> bool:
    """Return whether the last start of a run ended because its work was done."""
    summary = read_summary(folder)
    return summary is not None and summary.finished


def latest_progress(folder: Path) -> Progress:
    """Return the progress in the newest complete checkpoint of a run's folder; zero progress if there is none.

    Unreadable or incomplete checkpoints are skipped; the trainer skips them too and logs it.
    """
    found = filter(None, map(_read, (folder / "checkpoints").glob("step-*/checkpoint.json")))
    newest = max(found, key=lambda manifest: (manifest.progress.step, manifest.saved_at), default=None)
    return newest.progress if newest else Progress()


def _read(file: Path) -> _Manifest | None:
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=_Manifest)
        whole = all((file.parent / name).stat().st_size == part.size for name, part in manifest.files.items())
    except (OSError, ValueError):
        return None
    return manifest if whole else None
