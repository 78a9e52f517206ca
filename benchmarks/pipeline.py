"""Overlap of rollout and training in whole runs: time per step, the trainer's waiting, time to a score.

    python -m benchmarks.pipeline [--only fixed,demo] [--seeds 1 2 3] [--json] [--check]

Real processes and a real Redis, started as by `penstock run`. Two studies:

`fixed`   The engine answers every request after a fixed time and serves one batch of groups at a time; the trainer's
          step takes a fixed time, without a model. All else is the real thing: claims, scores, checks, ledger, archive,
          weights and their publication. `ratio` is the time per step by the longer of the two times; 1 is perfect.
`demo`    The demo's model learns. The engine takes at least `--decode-ms` per decode step and the trainer at least
          `--step-seconds` per step, as larger models on machines of their own would: what they wait takes no CPU of
          this machine. Groups without variance are trained, too: dropped, they would let a step need ever more
          rollouts as the policy improves. The same prompts for each seed, with `pacing.max_staleness` 0 and
          `--max-staleness`. `waits` is the share of time in which the trainer had too few groups for a step. `sooner`
          is the ratio of the seconds from the first policy version to the last full batch; `held_out_difference`
          compares the scores that both have then on 200 other problems, `score_difference` what policy versions that
          were trained on equally many samples earned on average. `threshold_sooner` is about the first time that the
          mean of 512 completions was .9; two or three unlucky batches change it.

`--check` exits with 1 if a `ratio` is above 1.1, or if with staleness the trainer waits for 5 % of the time or more,
is less than 1.5 times sooner, or if one of the differences is above .05.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

from benchmarks.late import describe, trained_numbers
from workers.commands.evaluate.evaluation_engine import with_started_engine
from workers.demo.prepare import prepare_run
from workers.demo.scoring import score_policy
from workers.demo.task import held_out_rows
from workers.run.process_main import run_async
from workers.run.role_specs import ENGINE, MakeEngineSpec, MakeRoleSpecs, RoleSpec, role_specs
from workers.run.run_command import raise_for_failure, supervise
from workers.settings import Settings
from workers.train.checkpointing.checkpoint import CheckpointStore

ROLES = (sys.executable, "-m", "benchmarks.pipeline_roles")
BATCH, GROUP = 16, 8
CASES = ((1.0, 2.0), (1.5, 1.5), (2.0, 1.0), (0.5, 1.0))
"""Seconds of a batch's rollout, and of a step."""
WARM_STEPS = 3
"""Steps at the start that are not measured: the first ones find no group ready."""
WINDOW, THRESHOLD = 512, 0.9
RATIO, WAITS, SOONER, DIFFERENCE = 1.1, 0.05, 1.5, 0.05


def roles_with(trainer: str, seconds: float) -> MakeRoleSpecs:
    """Return the processes of `penstock run`, with a trainer of this benchmark."""

    def make(settings: Settings, file: Path, redis: str, engines: tuple[str, ...]) -> list[RoleSpec]:
        addresses = ("--redis", redis, *(part for url in engines for part in ("--engine", url)))
        command = (*ROLES, trainer, str(file), *addresses, "--seconds", str(seconds))
        specs = role_specs(settings, file, redis, engines)
        return [replace(spec, command=command) if spec.role == "train" else spec for spec in specs]

    return make


def engine_with(engine: str, *options: str) -> MakeEngineSpec:
    """Return an engine of this benchmark."""

    def make(_settings: Settings, file: Path, port: int) -> RoleSpec:
        return RoleSpec(role=ENGINE, command=(*ROLES, engine, str(file), "--port", str(port), *options))

    return make


def run(settings: Settings, make_roles: MakeRoleSpecs, make_engine: MakeEngineSpec) -> list[dict[str, Any]]:
    """Run to the end; return the metrics of every step."""
    result = supervise(settings, quiet=True, make_roles=make_roles, make_engine=make_engine)
    raise_for_failure(result, settings)
    return [json.loads(line) for line in (settings.folder / "metrics.jsonl").read_text().splitlines()]


def measure_fixed(rollout_s: float, train_s: float, steps: int) -> dict[str, Any]:
    """Measure the time per step of one case."""
    with tempfile.TemporaryDirectory(prefix="penstock-pipeline-") as name:
        numbers = trained_numbers(steps * BATCH)
        settings = describe(Path(name).resolve(), numbers, batch_size=BATCH)
        settings = replace(settings, rollout=replace(settings.rollout, group_size=GROUP))
        engine = engine_with("engine", "--seconds", str(rollout_s), "--slots", str(BATCH * GROUP))
        metrics = run(settings, roles_with("trainer", train_s), engine)
    ends = [step["time"] for step in metrics[WARM_STEPS:-1]]
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    return {
        "rollout_s": rollout_s,
        "train_s": train_s,
        "steps": len(ends) - 1,
        "step_s": round(step_s, 3),
        "ratio": round(step_s / max(rollout_s, train_s), 3),
        "publish_ms": round(1000 * statistics.median(step["publish/seconds"] for step in metrics)),
        "waits": round(statistics.mean(s["waiting_seconds"] / step_s for s in metrics[WARM_STEPS:-1]), 3),
    }


def measure_demo(seed: int, max_staleness: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the demo once."""
    with tempfile.TemporaryDirectory(prefix="penstock-pipeline-") as name:
        settings = prepare_run(Path(name).resolve() / "demo", seed, arguments.steps)
        (settings.folder / "run.toml").unlink()  # with the demo's own settings
        settings = replace(
            settings,
            run=replace(settings.run, dashboard="off"),
            pacing=replace(settings.pacing, max_staleness=max_staleness),
            filter=replace(settings.filter, zero_variance=False),
        )
        engine = engine_with("paced-engine", "--seconds", str(arguments.decode_ms / 1000))
        metrics = run(settings, roles_with("paced-trainer", arguments.step_seconds), engine)
        checkpoint = CheckpointStore(settings.folder / "checkpoints").latest()
        assert checkpoint is not None
        held_out = run_async(partial(score_held_out, settings, checkpoint.model))
    began = metrics[0]["publish/time"]  # version 0: rollouts begin
    full = metrics[:-1]  # the last step takes what is left
    seconds = full[-1]["time"] - began
    return {
        "max_staleness": max_staleness,
        "steps": len(metrics),
        "seconds": round(seconds, 2),
        "threshold_s": round(time_to_threshold(metrics, began), 2),
        "waits": round(sum(step["waiting_seconds"] for step in full[1:]) / (full[-1]["time"] - full[0]["time"]), 4),
        "computes": round(sum(step["seconds"] for step in full[1:]) / (full[-1]["time"] - full[0]["time"]), 4),
        "held_out": round(held_out, 4),
        "by_version": by_version(metrics),
        "by_step": [[round(s["time"] - began, 2), round(s["reward/mean"], 3)] for s in metrics],
    }


async def score_held_out(settings: Settings, model: Path) -> float:
    """Return the score of a policy on held-out problems, with an engine at full speed."""

    async def use(url: str, _version: int) -> float:
        return (await score_policy(settings, url, model, held_out_rows(200))).sampled

    return await with_started_engine(settings, model, use, settings.folder / "logs")


def mean_reward(metrics: Sequence[dict[str, Any]]) -> float:
    """Return the mean reward over all completions of a run."""
    counts = [step["reward/count"] for step in metrics]
    return sum(step["reward/mean"] * n for step, n in zip(metrics, counts, strict=True)) / sum(counts)


def by_version(metrics: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the mean reward that each policy version earned, by its number: how many batches it was trained on."""
    rewards: dict[int, list[float]] = {}
    for step in metrics:
        rewards.setdefault(round(step["version"] - step["staleness/mean"]), []).append(step["reward/mean"])
    return {version: round(statistics.mean(earned), 4) for version, earned in sorted(rewards.items())}


def time_to_threshold(metrics: Sequence[dict[str, Any]], began: float) -> float:
    """Return the seconds until the mean reward of the last completions reached the score; infinity if it never did."""
    for last in range(len(metrics)):
        first, count = last, metrics[last]["reward/count"]
        while first and count < WINDOW:
            first -= 1
            count += metrics[first]["reward/count"]
        if count >= WINDOW and mean_reward(metrics[first : last + 1]) >= THRESHOLD:
            return metrics[last]["time"] - began
    return float("inf")


def compare(overlapped: dict[str, Any], strict: dict[str, Any]) -> dict[str, float]:
    """Compare a run with staleness with one without."""
    both = overlapped["by_version"].keys() & strict["by_version"].keys()
    per_sample = statistics.mean(overlapped["by_version"][each] - strict["by_version"][each] for each in both)
    return {
        "sooner": round(strict["seconds"] / overlapped["seconds"], 2),
        "threshold_sooner": round(strict["threshold_s"] / overlapped["threshold_s"], 2),
        "waits": overlapped["waits"],
        "score_difference": round(per_sample, 4),
        "held_out_difference": round(overlapped["held_out"] - strict["held_out"], 4),
    }


def is_met(result: dict[str, Any]) -> bool:
    """Whether every aim is met."""
    return all(case["ratio"] <= RATIO for case in result.get("fixed", [])) and all(
        each["compared"]["waits"] < WAITS
        and each["compared"]["sooner"] >= SOONER
        and abs(each["compared"]["score_difference"]) <= DIFFERENCE
        and abs(each["compared"]["held_out_difference"]) <= DIFFERENCE
        for each in result.get("demo", [])
    )


def main() -> None:
    """Measure, print, and check the aims with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="fixed,demo")
    parser.add_argument("--fixed-steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=24, help="steps that the demo's prompts suffice for")
    parser.add_argument("--decode-ms", type=float, default=40.0)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    result: dict[str, Any] = {}
    if "fixed" in arguments.only:
        result["fixed"] = []
        for rollout_s, train_s in CASES:
            result["fixed"].append(measure_fixed(rollout_s, train_s, arguments.fixed_steps))
            print(result["fixed"][-1], file=sys.stderr, flush=True)
    if "demo" in arguments.only:
        result["demo"] = []
        for seed in arguments.seeds:
            strict, overlapped = (
                measure_demo(seed, staleness, arguments) for staleness in (0, arguments.max_staleness)
            )
            compared = compare(overlapped, strict)
            result["demo"].append({"seed": seed, "strict": strict, "overlapped": overlapped, "compared": compared})
            print(seed, compared, file=sys.stderr, flush=True)
    print(json.dumps(result, indent=None if arguments.json else 1))
    if arguments.check and not is_met(result):
        print("an aim is not met", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
