"""The policies of `pacing.stale_policy` in whole runs, with lognormal completion lengths and an instant trainer.

    python -m benchmarks.late [--groups 480] [--seed 1] [--json]

Real processes; the engine is scripted (`late_engine.py`: lognormal lengths, sigma 1, 2 ms per token), the learner is
the one of the soak tests. `cancel` runs twice: once another attempt at a prompt has the same lengths (hard prompts
stay hard), once lengths are drawn again, which favours short completions.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
from msgspec import Struct
from msgspec.structs import asdict, replace

from benchmarks.late_engine import length
from stream.connection.run_connection import RunConnection
from stream.operator.status import RunStatus
from tests.soak.ends import GROUP_SIZE, TRAINED, numbers_with
from tests.soak.project import write_project
from tests.soak.run import status_of, supervise
from workers.launch.supervisor import RunOutcome
from workers.settings import Settings

Late = Literal["train", "wait", "cancel"]

POLL_S = 0.01
MEDIAN = 64.0
WORKERS = 2


def describe(
    folder: Path,
    numbers: list[int],
    *,
    late: Late = "train",
    max_staleness: int = 1,
    batch_size: int = 8,
    save_every: int = 50,
) -> Settings:
    """Settings of a run whose prompts are these numbers; `tests.soak.ends` defines each number's outcome."""
    settings = write_project(
        folder,
        numbers,
        pacing={"stale_policy": late, "max_staleness": max_staleness},
        train={"batch_size": batch_size, "save_every": save_every},
        rollout={"max_tokens": 1 << 16, "max_tokens_per_turn": 1 << 16},
        queue={"lease_s": 15.0},
        abort={"max_invalid_fraction": 1.0},
    )
    in_flight = -(-settings.capacity // WORKERS)
    return replace(settings, rollout=replace(settings.rollout, groups_in_flight=in_flight))


def trained_numbers(count: int) -> list[int]:
    """Return numbers whose prompts are trained."""
    return numbers_with(count, TRAINED)


LATE_ENGINE = str(Path(__file__).with_name("late_engine.py"))
"""The engine with lognormal lengths."""


@dataclass
class Observed:
    """Observations of a run."""

    outcome: RunOutcome | None = None
    looks: list[tuple[int, int]] = field(default_factory=list)
    """Groups dropped so far, and groups outstanding, each from one atomic look."""
    last: RunStatus | None = None
    seconds: float = 0.0


def run(settings: Settings, *engine: str, limit_s: float = 600.0) -> Observed:
    """Supervise a run and observe it every 10 ms; the outcome is None if it did not end.

    Args:
        settings: settings of the run.
        engine: Python's arguments that start its engine; none: the scripted one of the soak runs.
        limit_s: seconds until the run counts as hanging.
    """
    watched = Observed()

    async def watch(connection: RunConnection) -> None:
        while True:
            if (status := await status_of(connection)) is not None:
                watched.last = status
                watched.looks.append((sum(status.dropped.values()), status.outstanding))
            await anyio.sleep(POLL_S)

    began = time.monotonic()
    watched.outcome = supervise(settings, watch, limit_s=limit_s, **({"engine": engine} if engine else {}))
    watched.seconds = time.monotonic() - began
    return watched


def steps(settings: Settings) -> list[dict[str, Any]]:
    """Return the metrics of every step."""
    return [json.loads(line) for line in (settings.folder / "metrics.jsonl").read_text().splitlines()]


class Row(Struct, kw_only=True):
    """Results of one run."""

    policy: str
    seconds: float
    trained: int
    cancelled: int
    abandoned: int
    waited_s: float
    age_mean: float
    age_max: int
    over: float
    """Share of tokens older than `max_staleness`."""
    length_fed: float
    """Mean tokens of a completion, of the first attempt at each prompt, whether or not it was cancelled."""
    length_trained: float
    seconds_first: float
    seconds_trained: float


def measure(policy: str, settings: Settings, watched: Observed, numbers: list[int], seed: int) -> Row:
    """Summarize one run."""
    outcome = watched.outcome
    if outcome is None or outcome.failure or outcome.status is None:
        raise SystemExit(f"{policy}: the run did not come to its end ({outcome and outcome.failure})")
    step_metrics = steps(settings)
    tokens = [step["tokens/sampled"] for step in step_metrics]
    rows = sum(step["rows/valid"] for step in step_metrics)

    def mean(name: str) -> float:
        return sum(step[name] * n for step, n in zip(step_metrics, tokens, strict=True)) / sum(tokens)

    fed = [length(seed, MEDIAN, number, draw) for number in numbers for draw in range(GROUP_SIZE)]
    return Row(
        policy=policy,
        seconds=round(watched.seconds, 1),
        trained=outcome.status.counts.get("trained", 0),
        cancelled=outcome.status.counts.get("cancelled", 0),
        abandoned=int(sum(step.get("stragglers/abandoned", 0) for step in step_metrics)),
        waited_s=round(sum(step.get("stragglers/seconds", 0.0) for step in step_metrics), 1),
        age_mean=round(mean("staleness/mean"), 2),
        age_max=int(max(step["staleness/max"] for step in step_metrics)),
        over=round(mean("staleness/over"), 3),
        length_fed=round(statistics.mean(fed), 1),
        length_trained=round(sum(tokens) / rows, 1),
        seconds_first=round(statistics.mean(step["attempt/seconds_first"] for step in step_metrics), 3),
        seconds_trained=round(statistics.mean(step["attempt/seconds"] for step in step_metrics), 3),
    )


def study(late: Late, groups: int, seed: int, max_staleness: int, *, draw_anew: bool = False) -> Row:
    """Run one policy."""
    numbers = trained_numbers(groups)
    with tempfile.TemporaryDirectory(prefix="penstock-late-") as folder:
        settings = describe(Path(folder).resolve(), numbers, late=late, max_staleness=max_staleness)
        options = ("--seed", str(seed), "--median", str(MEDIAN), *(["--draw-anew"] if draw_anew else []))
        watched = run(settings, LATE_ENGINE, *options)
        name = late if late != "cancel" else f"cancel, lengths {'drawn anew' if draw_anew else 'the same again'}"
        return measure(name, settings, watched, numbers, seed)


def table(rows: list[Row]) -> str:
    """Format a Markdown table."""
    head = "trained | cancelled | age: mean | most | over the bound | waited for stragglers"
    lines = [
        f"| `late` | {head} | length: trained / fed | seconds of attempts: trained / first | run |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.policy} | {r.trained} | {r.cancelled} | {r.age_mean:.2f} | {r.age_max} | {r.over:.1%} "
        f"| {r.waited_s:.1f} s, {r.abandoned} abandoned | {r.length_trained:.1f} / {r.length_fed:.1f} "
        f"| {r.seconds_trained:.2f} / ≥ {r.seconds_first:.2f} | {r.seconds:.0f} s |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Run all four."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=480)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    one = partial(study, groups=options.groups, seed=options.seed, max_staleness=options.max_staleness)
    rows = [one("train"), one("wait"), one("cancel"), one("cancel", draw_anew=True)]
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))


if __name__ == "__main__":
    main()
