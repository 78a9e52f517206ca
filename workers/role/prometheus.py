"""Prometheus metrics of the roles: what each process counts. `docs/metrics.md` lists all of them.

Each role has a registry of its own, because a process serves only what it measures: a rollout worker that reported 0
trained groups would be wrong. Names and units follow Prometheus' conventions (base units, `_total` for counters). A
label's values are few and known in advance; a prompt's id is never one.

The run's own figures (queues, pacing, outcomes) are in `workers.role.run_metrics`.
"""

import math
from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from stream.records import Completion
from stream.validity import Measured, Unmeasured

disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` series for each counter would double what is scraped

WORKER: Final = CollectorRegistry()
"""Rollout workers and scorers: the work loop."""
ROLLOUT: Final = CollectorRegistry()
SCORE: Final = CollectorRegistry()
TRAIN: Final = CollectorRegistry()
SUPERVISOR: Final = CollectorRegistry()

REGISTRIES: Final[Mapping[str, tuple[CollectorRegistry, ...]]] = {
    "feed": (),
    "rollout": (WORKER, ROLLOUT),
    "score": (WORKER, SCORE),
    "train": (TRAIN,),
    "supervisor": (SUPERVISOR,),
}
"""Registries of each role; `feed` serves the run's figures."""

_LONG: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)

# Work loop

entries: Final = Counter(
    "penstock_entries_total",
    "Entries that this worker claimed and ended: completed, given back, or dead-lettered.",
    ("stage", "outcome"),
    registry=WORKER,
)
entry_duration: Final = Histogram(
    "penstock_entry_duration_seconds",
    "Time from the start of the work on an entry to its end, whatever the end.",
    ("stage",),
    buckets=_LONG,
    registry=WORKER,
)
leases_held: Final = Gauge("penstock_leases_held", "Leases that this worker holds now.", ("stage",), registry=WORKER)
oldest_lease_age: Final = Gauge(
    "penstock_oldest_lease_age_seconds",
    "Time since the claim of the oldest lease that this worker holds; 0 without any.",
    ("stage",),
    registry=WORKER,
)

# Rollout

engine_latency: Final = Histogram(
    "penstock_engine_request_duration_seconds",
    "Time from sending a request for one turn to the engine's valid answer, without waiting for a free engine.",
    buckets=_LONG,
    registry=ROLLOUT,
)
engine_failures: Final = Counter(
    "penstock_engine_request_failures_total",
    "Requests that an engine did not answer validly, by kind of error.",
    ("error",),
    registry=ROLLOUT,
)
sampled_tokens: Final = Counter(
    "penstock_sampled_tokens_total", "Tokens that engines sampled for this worker.", registry=ROLLOUT
)
completions: Final = Counter(
    "penstock_completions_total",
    "Completions of finished groups, by how the episode ended: finished, truncated:REASON or failed:REASON.",
    ("end",),
    registry=ROLLOUT,
)
turns: Final = Counter("penstock_turns_total", "Turns of completions of finished groups.", registry=ROLLOUT)
tool_calls: Final = Counter("penstock_tool_calls_total", "Tool calls in finished groups.", registry=ROLLOUT)
tool_errors: Final = Counter(
    "penstock_tool_errors_total", "Tool calls in finished groups that ended with an error.", registry=ROLLOUT
)
episode_seconds: Final = Counter(
    "penstock_episode_seconds_total",
    "Wall time of episodes in finished groups, by activity; `total` includes the other activities.",
    ("activity",),
    registry=ROLLOUT,
)
engines_known: Final = Gauge("penstock_engines_known", "Engines that this worker knows.", registry=ROLLOUT)
engines_healthy: Final = Gauge(
    "penstock_engines_healthy", "Engines that answer this worker and are fit for the run.", registry=ROLLOUT
)

sandboxes: Final = Gauge(
    "penstock_sandboxes", "Sandboxes of this worker now: starting, open, or removing.", ("state",), registry=ROLLOUT
)
sandbox_start: Final = Histogram(
    "penstock_sandbox_start_seconds",
    "Time to create and start a sandbox, without waiting for its turn.",
    buckets=_LONG,
    registry=ROLLOUT,
)
sandboxes_ended: Final = Counter(
    "penstock_sandboxes_ended_total",
    "Sandboxes that this worker removed: stopped (its own), reaped (lost by their owner), or stray (without a record).",
    ("outcome",),
    registry=ROLLOUT,
)
sandbox_failures: Final = Counter(
    "penstock_sandbox_failures_total",
    "Failures of sandboxes other than by the policy, by kind: create, image, lost, unreachable, full or fenced.",
    ("reason",),
    registry=ROLLOUT,
)

# Score

rewards: Final = Counter(
    "penstock_rewards_total",
    "Completions scored: measured, unmeasured:REASON, or failed before they could be.",
    ("state",),
    registry=SCORE,
)

# Train

steps: Final = Counter("penstock_steps_total", "Optimizer steps since this trainer started.", registry=TRAIN)
step_duration: Final = Histogram(
    "penstock_step_duration_seconds",
    "Time of an optimizer step with the collection of its groups, and of waiting for the publication before it.",
    buckets=_LONG,
    registry=TRAIN,
)
train_duration: Final = Histogram(
    "penstock_train_duration_seconds", "Time of the optimizer step alone.", buckets=_LONG, registry=TRAIN
)
trained_tokens: Final = Counter(
    "penstock_trained_tokens_total", "Sampled tokens in the batches of the optimizer steps.", registry=TRAIN
)
token_rate: Final = Gauge(
    "penstock_trained_tokens_per_second",
    "Sampled tokens of the last step divided by the time of that step and the collection of its groups.",
    registry=TRAIN,
)
trained_completions: Final = Counter(
    "penstock_trained_completions_total",
    "Completions of the groups that were trained or dropped, by state: valid, or why they bear no loss.",
    ("state",),
    registry=TRAIN,
)
completions_ratio: Final = Gauge(
    "penstock_step_completions_ratio",
    "Completions with this state divided by all, of the last step's groups and those dropped on the way to it.",
    ("state",),
    registry=TRAIN,
)
valid_ratio: Final = Gauge(
    "penstock_valid_ratio",
    "Valid completions divided by all, of the last step's groups and those dropped on the way to it.",
    registry=TRAIN,
)
staleness_mean: Final = Gauge(
    "penstock_staleness_mean_versions",
    "Policy versions between sampling and training in the last step, mean over loss tokens.",
    registry=TRAIN,
)
staleness_max: Final = Gauge(
    "penstock_staleness_max_versions", "The same figure, largest over loss tokens.", registry=TRAIN
)
reward_mean: Final = Gauge("penstock_reward_mean", "Mean reward of the last step (`reward/mean`).", registry=TRAIN)
publish_duration: Final = Histogram(
    "penstock_publish_duration_seconds",
    "Time of a publication: write the weights, push them to the engines, announce the version.",
    buckets=_LONG,
    registry=TRAIN,
)
published_version: Final = Gauge(
    "penstock_published_version", "Policy version that this trainer published last.", registry=TRAIN
)
published_at: Final = Gauge(
    "penstock_last_publication_timestamp_seconds", "Unix time of the last publication.", registry=TRAIN
)

# Supervisor

processes: Final = Gauge(
    "penstock_processes", "Running processes that the supervisor started, by role.", ("role",), registry=SUPERVISOR
)
process_restarts: Final = Counter(
    "penstock_process_restarts_total",
    "Restarts of a role's processes after a failure; one more than five within ten minutes ends the run.",
    ("role",),
    registry=SUPERVISOR,
)

for _gauge in (
    *(engines_known, engines_healthy, token_rate, valid_ratio, staleness_mean, staleness_max, reward_mean),
    *(published_version, published_at),
):
    _gauge.set(math.nan)  # nothing is measured yet; a 0 would set off alerts

_activity_seconds: Final = {
    name: episode_seconds.labels(name) for name in ("reset", "engine", "tools", "reward", "total")
}
_MEASURED, _FAILED, _FINISHED = "measured", "failed", "finished"


def count_group(group: Sequence[Completion]) -> None:
    """Count the completions of a group that was rolled out."""
    for end, count in Counts(map(_completion_end, group)).items():
        completions.labels(end).inc(count)
    turns.inc(sum(each.turns for each in group))
    tool_calls.inc(sum(each.tool_calls for each in group))
    tool_errors.inc(sum(each.tool_errors for each in group))
    for name, counter in _activity_seconds.items():
        counter.inc(sum(each.seconds.get(name, 0.0) for each in group))


def count_rewards(group: Sequence[Completion]) -> None:
    """Count the completions of a group that was scored."""
    for completion in group:
        match completion.reward:
            case Measured():
                state = _MEASURED
            case Unmeasured(reason):
                state = f"unmeasured:{reason}"
            case _:
                state = _FAILED
        rewards.labels(state).inc()


def count_step(metrics: Mapping[str, float | int]) -> None:
    """Count an optimizer step, given its line of `metrics.jsonl`."""
    steps.inc()
    step_duration.observe(metrics["step_seconds"])
    train_duration.observe(metrics.get("seconds", 0.0))
    trained_tokens.inc(metrics.get("tokens/sampled", 0))
    token_rate.set(metrics["tokens_per_second"])
    states = {name.removeprefix("rows/"): value for name, value in metrics.items() if name.startswith("rows/")}
    completions_ratio.clear()
    for state, count in states.items():
        trained_completions.labels(state).inc(count)
        completions_ratio.labels(state).set(count / max(1, sum(states.values())))
    for gauge, name in (
        (valid_ratio, "valid_fraction"),
        (staleness_mean, "staleness/mean"),
        (staleness_max, "staleness/max"),
        (reward_mean, "reward/mean"),
    ):
        gauge.set(metrics.get(name, math.nan))


def count_publication(version: int, seconds: float) -> None:
    """Note that a policy version was published just now."""
    publish_duration.observe(seconds)
    published_version.set(version)
    published_at.set_to_current_time()


def watch_leases(stage: str, count: Callable[[], int], oldest_age_s: Callable[[], float]) -> None:
    """Report the leases of a stage that this worker holds; the functions are called at each scrape, in a thread."""
    leases_held.labels(stage).set_function(count)
    oldest_lease_age.labels(stage).set_function(oldest_age_s)


def _completion_end(completion: Completion) -> str:
    if completion.failure is not None:
        return f"failed:{completion.failure.reason}"
    return f"truncated:{completion.truncated}" if completion.truncated else _FINISHED
