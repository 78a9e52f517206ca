"""Final numbers of a run, which must balance (`fed = trained + dropped + dead + outstanding`), and what they mean.

A run that ended normally may have learned nothing; this says why.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from stream.causes import ErrorCause
from stream.errors import RunFailedError
from stream.operator.status import RunStatus
from stream.wording import format_counts
from workers.runs.metrics_file import finite_value, metric_value
from workers.runs.progress import GroupTotals, Progress
from workers.settings import Settings

_BLOCK: Final = 5
"""Steps that are averaged at a run's beginning and end."""
_PART, _MEAN = "reward/part/", "/mean"
_ADVICE: Final = (
    "Look at the completion below and at the reward function: equal rewards within a group have no advantage, whatever "
    "their value (docs/troubleshooting.md)"
)


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
    why_untrained: str = ""
    """Why the run cannot have learned anything; empty if it can have."""
    failure: FailureReport | None = None

    def _repr_html_(self) -> str:
        from workers.runs.html import html_facts

        end = "failed" if self.failure else "finished" if self.finished else "stopped"
        facts = {
            "steps": self.steps,
            "prompts": self.prompt_counts_text,
            "dropped": format_counts(self.groups_dropped),
            "completions": format_counts(self.completion_states),
            "totals": describe_totals(self.totals),
            "score before": self.score_before,
            "score after": self.score_after,
            "tokens per second": self.tokens_per_second,
            "seconds": self.seconds,
            "failure": self.failure.message if self.failure else "",
            "why untrained": self.why_untrained,
        }
        return html_facts(f"the run {end}", facts)

    @property
    def is_balanced(self) -> bool:
        """Whether every fed prompt is accounted for."""
        return self.fed == self.groups_trained + sum(self.groups_dropped.values()) + self.dead + self.outstanding

    @property
    def prompt_counts_text(self) -> str:
        """The prompts by outcome, as an equation in words."""
        return (
            f"{self.fed} fed {'=' if self.is_balanced else '≠'} {self.groups_trained} trained + "
            f"{sum(self.groups_dropped.values())} dropped + {self.dead} dead + {self.outstanding} outstanding"
        )


def summarize(
    status: RunStatus, before: Progress, after: Progress, seconds: float, failure: RunFailedError | None = None
) -> RunSummary:
    """Summarize a run.

    Args:
        status: the run's last status.
        before: progress in the latest checkpoint when the run was last started.
        after: progress in the latest checkpoint now.
        seconds: wall time since that start.
        failure: error that ended the run, if one did.
    """
    count = after.staleness_count
    staleness = Staleness(after.staleness_sum / count, after.staleness_max) if count else Staleness()
    return RunSummary(
        steps=after.step,
        groups_trained=status.prompt_counts["trained"],
        groups_dropped=status.dropped,
        completion_states=after.completion_states,
        staleness=staleness,
        tokens_per_second=round(max(0, after.tokens - before.tokens) / seconds, 1),
        seconds=round(seconds, 3),
        fed=status.prompt_counts["fed"],
        outstanding=status.prompt_counts["outstanding"],
        dead=status.prompt_counts["dead"],
        duplicates=status.counts.get("duplicates", 0),
        rejected_rows=int(status.feed.get("rejected_rows", 0)),
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


def why_untrained(totals: GroupTotals, trained: int, settings: Settings) -> str:
    """Return why a run cannot have learned anything; empty if it can have, or if `train.learning_rate` is 0.

    Args:
        totals: of the run.
        trained: number of groups that were trained.
        settings: of the run.
    """
    if not totals.groups or not settings.train.learning_rate:
        return ""
    outcome = "nothing was learned" if trained else "nothing was trained"
    if settings.estimator.within_group and totals.compared:
        if totals.tied == totals.compared:
            value = _range(totals.tied_min, totals.tied_max)
            return f"{totals.tied} of {totals.groups} groups had equal rewards ({value}); {outcome}. {_ADVICE}"
    elif totals.reward_count > 1 and totals.reward_min == totals.reward_max:
        return f"all {totals.reward_count} rewards were equal ({totals.reward_min}); {outcome}. {_ADVICE}"
    if not trained:
        return f"not one of {totals.groups} groups was trained; the reasons are above, under `dropped`"
    return ""


def describe_early_end(steps: int, dropped: int, settings: Settings) -> str:
    """Return that a finished run had too little data for `train.max_steps`; empty if it had enough, or names no number.

    Args:
        steps: optimizer steps of the run.
        dropped: groups that bore no step.
        settings: of the run.
    """
    wanted = settings.train.max_steps
    if steps >= wanted:
        return ""
    why = f", and {dropped} groups were dropped" if dropped else ""
    return (
        f"the data were used up after {steps} of train.max_steps = {wanted} steps{why}: more rows, or more "
        f"than data.epochs = {settings.data.epochs}, give more steps"
    )


def describe_totals(totals: GroupTotals) -> str:
    """Return mean reward, and shares of tied groups, tool errors and truncations, in one line."""
    if not totals.completions:
        return ""
    mean = "no reward was measured" if totals.mean_reward is None else f"mean reward {totals.mean_reward:.3f}"
    attempts = max(totals.tool_calls, totals.tool_errors)  # a malformed call is an error, and no call
    calls = f"{attempts} tool calls" if attempts else "no tool was called"
    if totals.tool_errors:
        calls = f"{totals.tool_errors / attempts:.0%} of {calls} failed"
    return (
        f"{mean} over {totals.completions} completions; equal rewards in {totals.tied} of {totals.groups} groups; "
        f"{calls}; {totals.truncated / totals.completions:.0%} of completions were truncated"
    )


def describe_rewards(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return how the mean reward and its parts moved from the first steps of a run to the last, in one line.

    Example: `reward of the first 5 steps 0.31, of the last 5 1.42; env.served 0.12 → 0.01, env.clean 0.19 → 1.41`.
    Empty with fewer than two steps, or without a measured reward.
    """
    block = min(_BLOCK, len(steps) // 2)
    first, last = steps[:block], steps[-block:]
    before = [value for step in first if (value := metric_value(step, "reward")) is not None]
    now = [value for step in last if (value := metric_value(step, "reward")) is not None]
    if not block or not before or not now:
        return ""
    shown_steps = (*first, *last)
    names = sorted({name for step in shown_steps for name in step if name.startswith(_PART) and name.endswith(_MEAN)})
    parts = []
    for name in names if len(names) > 1 else []:
        values = [[value for step in some if (value := finite_value(step, name)) is not None] for some in (first, last)]
        shown = " → ".join(f"{fmean(each):.3g}" if each else "none" for each in values)
        parts.append(f"{name.removeprefix(_PART).removesuffix(_MEAN)} {shown}")
    count = "step" if block == 1 else f"{block} steps"
    text = f"reward of the first {count} {fmean(before):.3g}, of the last {count} {fmean(now):.3g}"
    return "; ".join(filter(None, [text, ", ".join(parts)]))


def _range(low: float | None, high: float | None) -> str:
    return f"{low}" if low == high else f"from {low} to {high}"
