"""Where a run's prompts are and what its completions are doing, as values: what screens, pages and `--json` show."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from stream.operator.bottleneck import Bottleneck, find_bottleneck
from stream.operator.memory import MachineMemory
from stream.operator.status import EvaluationStatus, Pause, RunStatus, StageStatus, groups_in_flight, ongoing_activities
from stream.queue.in_flight import ACTIVITY_TEXTS
from stream.validity import TruncationReason

_TRUNCATION_REASONS: Final = frozenset(TruncationReason)


class StageReport(Struct, kw_only=True):
    """One stage, in the form of `--json`."""

    depth: int
    """Unfinished entries; in `scored`, without entries that the trainer has ended and that wait for a checkpoint."""
    claimed: int
    delayed: int
    """Entries that wait for their retry delay."""
    lag: int
    """Entries that were never claimed."""
    oldest_age_s: float
    rate: float
    """Entries completed per second, over the last minute."""
    consumers: dict[str, int]
    """Leased entries by worker, without idle workers."""


class EvaluationReport(Struct, kw_only=True):
    """The running evaluation, or the last one, in the form of `--json`."""

    stages: dict[str, StageReport]
    version: int
    step: int
    prompts: int
    """Number of prompts in the evaluation."""
    open: int
    """Prompts not yet sampled and scored."""
    dead: int
    under_way: bool
    result: dict[str, Any]
    """Result of the last finished evaluation, as in `eval.jsonl`; empty before the first."""

    @property
    def progress(self) -> str:
        """The progress of the running evaluation in words; empty if none is running."""
        if not self.under_way:
            return ""
        dead = f", {self.dead} dead" if self.dead else ""
        return f"version {self.version}: {self.prompts - self.open} of {self.prompts} prompts{dead}"


class QueueReport(Struct, kw_only=True):
    """The status of a run, in the form of `--json`."""

    run: str
    at: float
    """Unix time in seconds, by the server's clock."""
    status_id: str
    """Id of this state; two reports with one id have the same counts."""
    bottleneck: Bottleneck
    """What limits the run now."""
    stages: dict[str, StageReport]
    fed: int
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]
    dead: int
    outstanding: int
    """Unfinished prompts: `fed = trained + dropped + dead + outstanding`."""
    groups_outstanding: int
    """Outstanding groups, at most `capacity`."""
    capacity: int | None
    """Largest number of outstanding groups; None if unknown."""
    version: int
    step: int
    dead_letters: int
    """Dead letters, including entries of unknown origin."""
    duplicates: int
    cancelled: int
    """Attempts cancelled because they were stale (`pacing.stale_policy = "cancel"`)."""
    rows: dict[str, int]
    """Completions of the last step by state: `valid`, or why they are invalid."""
    truncated: dict[str, int]
    """Truncated completions of the last step by reason, trained or not."""
    finished: str
    """Reason why the run has finished; empty: it has not."""
    paused_by: str
    """Operator who paused the run; empty: it is not paused."""
    paused_at: float | None
    """Unix time of the pause in seconds, by the server's clock; None if not paused."""
    evaluation: EvaluationReport | None
    """None: the run has no evaluation."""
    memory: list[MachineMemory] = []
    """Machines, and what processes hold on them; empty if none reports."""
    disk: list[str] = []
    """Disks that cannot be written, for which the run waits."""

    @property
    def paused(self) -> str:
        """Who paused the run, and when, in words; empty: it is not paused."""
        return str(Pause(self.paused_by, self.paused_at or 0.0)) if self.paused_by else ""

    @property
    def all_stages(self) -> dict[str, StageReport]:
        """The stages of the run, and of its evaluation."""
        return self.stages | (self.evaluation.stages if self.evaluation else {})


class Activity(Struct, frozen=True, kw_only=True):
    """What one completion is doing, or a group as a whole, and for how long."""

    seconds: float
    text: str
    """In words, with the names of tools or reward functions: `tool add`."""
    name: str
    """In words, without these names."""
    detail: str
    """The names of the tools or reward functions."""
    prompt: str
    completion: int | None
    """Its index; None: the group as a whole does it."""
    turn: int | None
    """The model's turn, from 1; None of a group."""
    versions: str
    """Oldest and newest policy version that sampled so far: `7`, `7-9`; empty before the first turn."""
    environment: str
    engine: str
    """Host and port of the engine that samples, or that sampled last."""
    worker: str
    ended: int
    """Completions of the group that have ended, of `total`."""
    total: int


def queue_report(run: str, status: RunStatus, disk: Sequence[str] = ()) -> QueueReport:
    """Return the status of a run in the form of `--json`; `disk`: the disks that cannot be written."""
    return QueueReport(
        run=run,
        at=status.now_ms / 1000,
        status_id=status.status_id,
        bottleneck=find_bottleneck(status, groups_in_flight(status)),
        stages=_stage_reports(status.stages),
        **status.prompt_counts,
        dropped_by_reason=status.dropped,
        groups_outstanding=status.outstanding,
        capacity=int(status.meta["capacity"]) if "capacity" in status.meta else None,
        version=status.version,
        step=int(status.policy.get("step", 0)),
        dead_letters=status.dead,
        duplicates=status.counts.get("duplicates", 0),
        cancelled=status.counts.get("cancelled", 0),
        rows=_counts_with_prefix(status, "rows/"),
        truncated={
            reason: n
            for reason, n in _counts_with_prefix(status, "truncated/").items()
            if reason in _TRUNCATION_REASONS
        },
        finished=status.meta.get("finished", ""),
        paused_by=status.paused.paused_by if status.paused else "",
        paused_at=status.paused.paused_at if status.paused else None,
        evaluation=evaluation_report(status.evaluation) if status.evaluation else None,
        memory=status.machines,
        disk=list(disk),
    )


def _stage_reports(stages: dict[str, StageStatus]) -> dict[str, StageReport]:
    return {
        name: StageReport(
            depth=stage.depth - stage.marked,
            claimed=stage.claimed,
            delayed=stage.delayed,
            lag=stage.lag,
            oldest_age_s=stage.oldest_age_ms / 1000,
            rate=stage.rate,
            consumers={consumer: count for consumer, count in stage.consumers.items() if count},
        )
        for name, stage in stages.items()
    }


def evaluation_report(status: EvaluationStatus) -> EvaluationReport:
    """Return the status of an evaluation in the form of `--json`."""
    return EvaluationReport(
        stages=_stage_reports(status.stages),
        version=status.version,
        step=status.step,
        prompts=status.total,
        open=status.unfinished,
        dead=status.total - status.unfinished - status.results if status.is_running else 0,
        under_way=status.is_running,
        result=status.result,
    )


def activities(status: RunStatus) -> list[Activity]:
    """Return what all leases are doing, the longest unchanged first."""
    now = status.now_ms / 1000
    shown = []
    for ongoing in ongoing_activities(groups_in_flight(status)):
        group, completion = ongoing.group, ongoing.completion
        versions = completion.versions if completion else []
        shown.append(
            Activity(
                seconds=max(0.0, now - ongoing.since),
                text=ongoing.text,
                name=ACTIVITY_TEXTS.get(ongoing.activity, ongoing.activity.replace("_", " ")),
                detail=completion.detail if completion else group.detail,
                prompt=group.prompt,
                completion=completion.index if completion else None,
                turn=completion.turn + 1 if completion else None,
                versions="-".join(str(version) for version in sorted({*versions[:1], *versions[-1:]})),
                environment=group.environment,
                engine=completion.engine.removeprefix("http://") if completion else "",
                worker=group.worker,
                ended=group.ended,
                total=group.total,
            )
        )
    return shown


def in_flight_report(run: str, status: RunStatus, stuck_s: float) -> dict[str, Any]:
    """Return the groups in flight with their completions, in the form of `--json`.

    Args:
        run: name of the run.
        status: with the reports of workers.
        stuck_s: seconds after which an activity counts as stuck.
    """
    groups = groups_in_flight(status)
    return {
        "run": run,
        "at": status.now_ms / 1000,
        "status_id": status.status_id,
        "stuck": count_stuck(activities(status), stuck_s),
        "groups": [_group_as_json(msgspec.to_builtins(group)) for group in groups],
    }


def count_stuck(shown: Sequence[Activity], stuck_s: float) -> int:
    """Return how many activities have not changed for longer than this."""
    return sum(each.seconds > stuck_s for each in shown)


def format_result(line: Mapping[str, Any]) -> str:
    """Return a line of `eval.jsonl` as text; empty without one.

    Where they differ, both scores are shown: over valid completions, and over all, with invalid ones counted as wrong.
    """
    if not line:
        return ""
    score = line["overall"]
    parts = [f"mean {_both(score['mean_valid'], score['mean_all'])}"]
    parts += [f"pass@{k} {_both(both.get('valid'), both.get('all'))}" for k, both in score["pass_at"].items()]
    invalid = sum(score["invalid"].values())
    parts += [f"{score['valid']} of {score['n']} valid"] if invalid else []
    parts += [f"{score['mixed']} mixed"] if score["mixed"] else []
    return f"version {line['version']}: {' · '.join(parts)}"


def _both(valid: float | None, every: float | None) -> str:
    one, other = ("-" if value is None else f"{value:.3f}" for value in (valid, every))
    return one if one == other else f"{one} ({other} of all)"


def _group_as_json(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with its completions as objects, which are arrays in the record."""
    names = ("index", "turn", "activity", "detail", "since", "engine", "versions")
    return group | {"completions": [dict(zip(names, each, strict=True)) for each in group.get("completions", [])]}


def _counts_with_prefix(status: RunStatus, prefix: str) -> dict[str, int]:
    """Return the last step's counters with this prefix, by the rest of their names."""
    found = {name.removeprefix(prefix): value for name, value in status.metrics.items() if name.startswith(prefix)}
    return {name: int(value) for name, value in sorted(found.items()) if isinstance(value, int | float)}
