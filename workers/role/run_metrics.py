"""Prometheus metrics of a run as its server has them: queues, leases, pacing, outcomes, dead letters.

The feeder serves them: a run has exactly one, from its start to its end.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stream.operator.status import RunStatus, StageStatus

Labelled = Sequence[tuple[tuple[str, ...], float]]
"""Values of the labels, and the metric's value."""


class RunMetrics(Collector):
    """Reports the run's status; reads it with each scrape.

    Args:
        read: returns the status, None if the server does not answer; may be called from any thread.
    """

    def __init__(self, read: Callable[[], RunStatus | None]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering this collector does not read the status."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        status = self._read()
        yield _gauge(
            "penstock_run_status_up",
            "1 if the run's server answered; without an answer the other figures of the run are missing.",
            float(status is not None),
        )
        if status is not None:
            yield from run_metrics(status)


def run_metrics(status: RunStatus) -> Iterator[Metric]:
    """Return the metrics of a status."""
    stages = status.stages | (status.evaluation.stages if status.evaluation else {})
    yield from _stage_metrics(stages)
    yield from _prompt_metrics(status)
    yield from _pacing_metrics(status)
    yield from _memory_metrics(status)
    yield _gauge("penstock_policy_version", "Published policy version; -1 before the first.", status.version)
    yield _gauge(
        "penstock_trainer_lease_held",
        "1 while a trainer holds the run: it renewed its lease in time.",
        float(_trainer_holds_lease(status)),
    )
    yield _gauge("penstock_run_paused", "1 while the run is paused.", float(status.paused is not None))
    yield _gauge("penstock_run_finished", "1 once the run has finished.", float("finished" in status.meta))


def _stage_metrics(stages: dict[str, StageStatus]) -> Iterator[Metric]:
    columns: list[tuple[str, str, Callable[[StageStatus], float]]] = [
        (
            "penstock_queue_entries",
            "Entries of a stage that have not ended, claimed ones included.",
            lambda stage: stage.depth - stage.marked,
        ),
        ("penstock_queue_waiting_entries", "Entries of a stage that were never claimed.", lambda stage: stage.lag),
        ("penstock_queue_leases", "Entries of a stage that a worker holds.", lambda stage: stage.claimed),
        (
            "penstock_queue_delayed_entries",
            "Entries of a stage that were given back and wait for their retry.",
            lambda stage: stage.delayed,
        ),
        (
            "penstock_queue_oldest_age_seconds",
            "Age of the oldest entry of a stage, claimed or not, since it entered the stage.",
            lambda stage: stage.oldest_age_ms / 1000,
        ),
        ("penstock_queue_workers", "Workers that hold a lease in a stage.", _workers),
    ]
    for name, text, value in columns:
        yield _labelled(GaugeMetricFamily, name, text, ("stage",), [((n,), value(s)) for n, s in stages.items()])


def _prompt_metrics(status: RunStatus) -> Iterator[Metric]:
    count = status.counts.get
    yield _counter("penstock_prompts_fed_total", "Prompts fed.", count("fed", 0))
    yield _counter("penstock_groups_trained_total", "Groups that a step trained on.", count("trained", 0))
    yield _labelled(
        CounterMetricFamily,
        "penstock_groups_dropped_total",
        "Groups that ended without being trained on, by reason.",
        ("reason",),
        [((reason,), n) for reason, n in sorted(status.dropped.items())],
    )
    yield _counter(
        "penstock_attempts_cancelled_total", "Attempts that were given back as stale.", count("cancelled", 0)
    )
    yield _counter("penstock_duplicates_total", "Groups delivered once more for a prompt.", count("duplicates", 0))
    yield _labelled(
        CounterMetricFamily,
        "penstock_dead_letters_total",
        "Entries that became dead letters, by reason; retried and dropped ones stay counted.",
        ("reason",),
        [((reason,), n) for reason, n in sorted(status.dead_reasons.items())],
    )
    yield from _turn_metrics(status.turns)
    yield _gauge("penstock_dead_letters_unresolved", "Dead letters that were neither retried nor dropped.", status.dead)


def _turn_metrics(turns: dict[str, int]) -> Iterator[Metric]:
    yield _labelled(
        CounterMetricFamily,
        "penstock_sampled_turns_total",
        "Turns of the model: sampled, kept in a group that was rolled out, or lost and sampled again or given up.",
        ("state",),
        [((state,), turns.get(state, 0)) for state in ("sampled", "kept", "again")],
    )
    yield _labelled(
        CounterMetricFamily,
        "penstock_resumed_completions_total",
        "Completions in mid-episode whose worker died, by what the next one did.",
        ("method",),
        [((name.partition(":")[2],), n) for name, n in sorted(turns.items()) if name.startswith("resumed:")],
    )


def _pacing_metrics(status: RunStatus) -> Iterator[Metric]:
    yield _gauge(
        "penstock_prompts_unfinished", "Prompts fed that have no outcome yet, in whatever stage.", status.unfinished
    )
    yield _gauge(
        "penstock_groups_outstanding",
        "Groups that count against the capacity: claimed, waiting for a scorer or the trainer, or not published yet.",
        status.outstanding,
    )
    if "capacity" in status.meta:
        capacity = int(status.meta["capacity"])
        yield _gauge(
            "penstock_pacing_capacity_groups",
            "Largest number of outstanding groups: (pacing.max_staleness + 1) x groups per version.",
            capacity,
        )
        yield _gauge(
            "penstock_pacing_headroom_groups",
            "Groups that may start now; 0 means that more rollout workers would only wait for the trainer.",
            max(0, capacity - status.outstanding),
        )
    if "total" in status.feed:
        waiting = status.stages["prompts"].lag if "prompts" in status.stages else 0
        unfed = int(status.feed["total"]) - int(status.feed.get("cursor") or 0)
        yield _gauge(
            "penstock_prompts_left",
            "Prompts that no worker has claimed yet, fed or not; at 0 there is no work for more rollout workers.",
            max(0, unfed) + waiting,
        )


def _memory_metrics(status: RunStatus) -> Iterator[Metric]:
    held: dict[str, int] = {}
    swapped: dict[str, int] = {}
    for process in (each for machine in status.machines for each in machine.processes):
        role = process.name.partition("-")[0]
        held[role] = held.get(role, 0) + process.bytes
        swapped[role] = swapped.get(role, 0) + process.swapped
    yield _labelled(
        GaugeMetricFamily,
        "penstock_memory_bytes",
        "Memory that the processes of a role hold, swapped out or not; without files and shared libraries.",
        ("role",),
        [((role,), value) for role, value in sorted(held.items())],
    )
    yield _labelled(
        GaugeMetricFamily,
        "penstock_memory_swapped_bytes",
        "The part of it that is swapped out.",
        ("role",),
        [((role,), value) for role, value in sorted(swapped.items())],
    )
    short = [machine for machine in status.machines if machine.is_short]
    largest = {machine.largest.name.partition("-")[0] for machine in short if machine.largest}
    yield _labelled(
        GaugeMetricFamily,
        "penstock_memory_short",
        "1 for the role that holds most on a machine that swaps, or on which processes wait for memory; otherwise 0.",
        ("role",),
        [((role,), float(role in largest)) for role in sorted(held)],
    )


def _workers(stage: StageStatus) -> int:
    return sum(count > 0 for count in stage.consumers.values())


def _trainer_holds_lease(status: RunStatus) -> bool:
    return bool(status.policy.get("owner")) and float(status.policy.get("owner_until") or 0) > status.now_ms


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(
    family: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, labels: tuple[str, ...], rows: Labelled
) -> Metric:
    metric = family(name, text, labels=labels)
    for values, value in rows:
        metric.add_metric(values, value)
    return metric
