"""What limits a run now: the one part of the pipeline that has to become faster, or larger, with figures as evidence.

The number of outstanding groups is bounded, so groups pile up in front of the slowest part: the stage that has most of
them is where time is lost. If that is the rollout, the activities of the completions show which part of it is slow.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from stream.operator.status import RunStatus
from stream.queue.in_flight import ACTIVITY_TEXTS, ENVIRONMENT_ACTIVITIES, Activity, GroupInFlight
from stream.wording import quantity

Limit = Literal[
    "finished",
    "paused",
    "memory",
    "prompts",
    "rollout workers",
    "engines",
    "environment",
    "rewards",
    "scorers",
    "trainer",
]
"""What limits the run. `prompts`: none is left to claim. `rewards`: reward functions that run in rollout workers. A run
that is `finished` or `paused` is limited by nothing. `memory`: a machine swaps, which slows down everything on it."""

_WAITING_SHARE = 0.1
"""If more than this share of the completions waits for an engine, the engines are full, not just busy."""
_BUSY_SHARE = 0.9
"""A trainer that computes for at least this share of a step's time is never without work."""


class Bottleneck(Struct, frozen=True, kw_only=True):
    """What limits a run at one moment."""

    limit: Limit
    name: str = ""
    """Name of the environment that limits the run; empty if something else does."""
    process: str = ""
    """The process that holds most, if memory limits the run."""
    why: str
    """The figures in words."""
    figures: dict[str, float]
    """Counts of groups by name; `busy` is a share, and `in_flight/ACTIVITY` counts completions."""

    def __str__(self) -> str:
        if self.limit in {"finished", "paused"}:
            return self.why
        what = "out of prompts" if self.limit == "prompts" else f"limited by {self.limit}"
        return f"{what}{f' {self.name}' if self.name else ''}: {self.why}"


def find_bottleneck(status: RunStatus, groups: Sequence[GroupInFlight] = ()) -> Bottleneck:
    """Return what limits a run.

    Args:
        status: of the run.
        groups: what its workers hold (`groups_in_flight`); without them, a slow rollout is attributed to its workers.
    """
    load = _Load.of(status)
    figures = load.figures()
    if finished := status.meta.get("finished"):
        return Bottleneck(limit="finished", why=f"finished: {finished}", figures=figures)
    if status.paused:
        return Bottleneck(limit="paused", why=str(status.paused), figures=figures)
    if short := next((machine for machine in status.machines if machine.is_short), None):
        held = {f"memory/{each.name}": each.bytes for each in short.processes}
        process = short.largest.name if short.largest else ""
        return Bottleneck(limit="memory", process=process, why=short.problem, figures=figures | held)
    if load.is_training_limited:
        return Bottleneck(limit="trainer", why=load.describe_trainer(), figures=figures)
    if load.scoring > load.rolling_out:
        why = f"{quantity(load.scoring, 'group')} to score, {load.scoring_claimed:,} of them claimed by "
        why += quantity(load.scorers, "worker") if load.scorers else "nobody"
        return Bottleneck(limit="scorers", why=why, figures=figures)
    if not load.rolling_out and load.waiting and not load.is_full:
        retries = f", {load.delayed:,} of them for another attempt" if load.delayed else ""
        why = f"{quantity(load.waiting, 'prompt')} to roll out{retries}, and no worker holds one"
        return Bottleneck(limit="rollout workers", why=why, figures=figures)
    if not load.waiting and not load.is_full:
        return Bottleneck(limit="prompts", why=load.describe_prompts(status), figures=figures)
    return _find_rollout_bottleneck(load, groups, figures)


class _Load(Struct, frozen=True, kw_only=True):
    """How many groups of a run are where, and who works on them."""

    waiting: int
    """Prompts that no worker holds."""
    delayed: int
    """Prompts in `waiting` whose next attempt is not due yet."""
    rolling_out: int
    """Prompts that rollout workers hold."""
    rollout_workers: int
    """Rollout workers that hold a prompt."""
    scoring: int
    """Groups that are not scored yet."""
    scoring_claimed: int
    """Groups in `scoring` that scorers hold."""
    scorers: int
    """Scorers that hold a group."""
    scored: int
    """Scored groups that the trainer has not ended, including the groups of the step in progress."""
    unpublished: int
    """Groups that the trainer has ended and that still use capacity, because no newer policy version is published."""
    outstanding: int
    """Groups that use capacity."""
    capacity: int | None
    """Limit of `outstanding`; None if there is none."""
    batch_size: int
    """Groups of one step."""
    has_trainer: bool
    """Whether a trainer holds its lease."""
    busy: float | None
    """Share of the last step's time that the trainer computed; None if unknown."""

    @classmethod
    def of(cls, status: RunStatus) -> "_Load":
        prompts, groups, scored = (status.stages[name] for name in ("prompts", "groups", "scored"))
        metrics, until_ms = status.metrics, int(status.policy.get("owner_until", 0))
        unscored = prompts.claimed + groups.depth
        waiting_for_step = scored.depth - scored.marked
        return cls(
            waiting=prompts.depth - prompts.claimed,
            delayed=prompts.delayed,
            rolling_out=prompts.claimed,
            rollout_workers=sum(1 for count in prompts.consumers.values() if count),
            scoring=groups.depth,
            scoring_claimed=groups.claimed,
            scorers=sum(1 for count in groups.consumers.values() if count),
            scored=waiting_for_step,
            unpublished=max(0, status.outstanding - unscored - waiting_for_step),
            outstanding=status.outstanding,
            capacity=int(status.meta["capacity"]) if "capacity" in status.meta else None,
            batch_size=int(status.meta.get("batch_size", 1)),
            has_trainer="owner" in status.policy and until_ms > status.now_ms,
            busy=_busy_share(metrics.get("seconds"), metrics.get("step_seconds")),
        )

    @property
    def is_full(self) -> bool:
        """Whether the limit on outstanding groups keeps workers from claiming."""
        return self.capacity is not None and self.outstanding >= self.capacity

    @property
    def is_training_limited(self) -> bool:
        """Whether the trainer has a full batch, and groups pile up in front of it."""
        ready = self.scored + self.unpublished
        is_always_busy = self.has_trainer and self.busy is not None and self.busy >= _BUSY_SHARE
        piles_up = ready > max(self.rolling_out, self.scoring) or not self.has_trainer or is_always_busy
        return ready >= self.batch_size and piles_up

    def describe_trainer(self) -> str:
        ready = f"{quantity(self.scored, 'group')} scored"
        if self.unpublished:
            ready += f", {self.unpublished:,} trained and not published yet"
        if not self.has_trainer:
            return f"{ready}, and no trainer runs"
        busy = "" if self.busy is None else f"; it computed for {self.busy:.0%} of its last step"
        return f"{ready}, {self.batch_size:,} in a batch{busy}"

    def describe_prompts(self, status: RunStatus) -> str:
        fed = status.counts.get("fed", 0)
        if status.feed.get("done") == "1":
            return f"all {fed:,} are fed and claimed, {status.unfinished:,} without an outcome yet"
        total = f" of {int(status.feed['total']):,}" if "total" in status.feed else ""
        return f"{fed:,}{total} are fed, and none waits: the feeder does not keep up"

    def figures(self) -> dict[str, float]:
        """Return all numbers that are known, by name."""
        numbers = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in numbers.items() if value is not None}


def _find_rollout_bottleneck(load: _Load, groups: Sequence[GroupInFlight], figures: dict[str, float]) -> Bottleneck:
    """Return what limits a run whose groups are mostly being rolled out."""
    held = f"{quantity(load.rolling_out, 'group')} at {quantity(load.rollout_workers, 'rollout worker')}"
    held += f", {quantity(load.waiting, 'prompt')} waiting"
    # Completions by activity, where the whole group has one and where each completion has its own.
    group_activities: Counter[str] = Counter()
    own_activities: Counter[str] = Counter()
    environments: Counter[str] = Counter()  # completions in their environment, by its name
    for group in groups:
        if group.stage != "prompts":
            continue
        if group.activity:
            group_activities[group.activity] += max(1, group.total)
        for completion in group.completions:
            own_activities[completion.activity] += 1
            environments[group.environment] += completion.activity in ENVIRONMENT_ACTIVITIES
    in_environments, in_reward_functions = environments.total(), group_activities[Activity.REWARD]
    counts = own_activities + group_activities
    total = counts.total()
    if not total:
        return Bottleneck(limit="rollout workers", why=f"{held}; their activity is not reported yet", figures=figures)
    figures = figures | {f"in_flight/{name}": count for name, count in sorted(counts.items())}
    activities = ", ".join(f"{count:,} {ACTIVITY_TEXTS.get(name, name)}" for name, count in counts.most_common(4))
    why = f"{held}; of {quantity(total, 'completion')}: {activities}"
    if counts[Activity.ENGINE_WAIT] > _WAITING_SHARE * total:
        return Bottleneck(limit="engines", why=why, figures=figures)
    if in_environments > total / 2:
        ((name, _),) = environments.most_common(1)
        return Bottleneck(limit="environment", name=name, why=why, figures=figures)
    if in_reward_functions > total / 2:
        return Bottleneck(limit="rewards", why=why, figures=figures)
    if load.waiting and not load.is_full:
        return Bottleneck(limit="rollout workers", why=f"{why}; no engine is full", figures=figures)
    return Bottleneck(limit="engines", why=why, figures=figures)


def _busy_share(seconds: object, step_seconds: object) -> float | None:
    if isinstance(seconds, int | float) and isinstance(step_seconds, int | float) and step_seconds > 0:
        return min(1.0, float(seconds / step_seconds))
    return None
