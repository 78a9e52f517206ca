"""Print the tables of Prometheus metrics in docs/metrics.md: `python docs/metrics_page.py`. A test compares them."""

import sys
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.core import Metric

from stream.operator.memory import MachineMemory, ProcessMemory
from stream.operator.status import RunStatus, StageStatus
from workers.role import prometheus
from workers.role.run_metrics import run_metrics

ROLES = {
    "Of the run (feeder)": (),
    "Rollout workers and scorers": (prometheus.WORKER,),
    "Rollout workers": (prometheus.ROLLOUT,),
    "Scorers": (prometheus.SCORE,),
    "Trainer": (prometheus.TRAIN,),
    "Supervisor of `penstock run`": (prometheus.SUPERVISOR,),
}
LABELS = {
    metric.describe()[0].name: metric._labelnames  # noqa: SLF001  (the library has no public way to a metric's labels)
    for registries in ROLES.values()
    for registry in registries
    for metric in registry._collector_to_names  # noqa: SLF001
} | {
    "penstock_groups_dropped": ("reason",),
    "penstock_dead_letters": ("reason",),
    "penstock_sampled_turns": ("state",),
    "penstock_resumed_completions": ("method",),
}
_MACHINE = MachineMemory(
    host="host",
    total=24_000_000_000,
    available=2_000_000_000,
    swap_rate=5e6,
    processes=[ProcessMemory(name="train-0", bytes=21_000_000_000, swapped=1_000_000_000)],
)


def example_status() -> RunStatus:
    """Return a status in which each figure of a run is present."""
    stage = StageStatus(
        depth=3, claimed=1, delayed=0, marked=0, lag=2, oldest_age_ms=1500, rate=0.5, consumers={"r": 1}
    )
    return RunStatus(
        now_ms=1e12,
        stages=dict.fromkeys(("prompts", "groups", "scored"), stage),
        unfinished=9,
        outstanding=7,
        dead=1,
        counts={"fed": 12, "trained": 1, "dropped:ties": 1, "dead": 1},
        turns={"sampled": 30, "kept": 20, "resumed:replay": 1},
        dead_reasons={"data": 2},
        feed={"total": "20", "cursor": "12"},
        policy={"version": "1", "owner": "train-1", "owner_until": "2e12"},
        meta={"capacity": "8"},
        memory={"host": f"999999999999 {msgspec.json.encode(_MACHINE).decode()}"},
    )


def run_families() -> list[Metric]:
    """Return the run's metrics; `penstock_run_status_up` is reported by its collector."""
    return list(run_metrics(example_status()))


def families(title: str) -> list[Metric]:
    """Return the metrics of one section of the page."""
    return [metric for registry in ROLES[title] for metric in registry.collect()] if ROLES[title] else run_families()


def names() -> set[str]:
    """Return the name of every series that a process of Penstock may serve, as queries write them."""
    found = {"penstock_info", "penstock_run_status_up"}
    for title in ROLES:
        for metric in families(title):
            found.add(exposed_name(metric))
            if metric.type == "histogram":
                found |= {f"{metric.name}{suffix}" for suffix in ("_bucket", "_sum", "_count")}
    return found


def exposed_name(metric: Metric) -> str:
    """Return the name under which a metric is scraped."""
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def labels(metric: Metric) -> Iterable[str]:
    """Return the names of a metric's labels."""
    if metric.name in LABELS:
        return LABELS[metric.name]
    return sorted({name for sample in metric.samples for name in sample.labels} - {"le"})


def page() -> Iterator[str]:
    """Yield the lines of the tables."""
    for title in ROLES:
        yield from ("", f"## {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|")
        for metric in families(title):
            shown = ", ".join(f"`{name}`" for name in labels(metric))
            yield f"| `{exposed_name(metric)}` | {metric.type} | {shown} | {metric.documentation} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
