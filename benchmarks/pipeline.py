"""Overlap of rollout and training in whole runs: time per step, the trainer's waiting, time to the demo's score.

    python -m benchmarks.pipeline [--only fixed,demo] [--seeds 1 2 3] [--json] [--check]

Real processes and a real Redis, started as by `penstock run`. Two studies:

`fixed`   The engine answers every request after a fixed time and serves one batch of groups at a time; the trainer's
          step takes a fixed time, without a model. All else is the real thing: claims, scores, checks, ledger, archive,
          weights and their publication. `ratio` is the time per step by the longer of the two times; 1 is perfect.
`demo`    The demo's model learns. The engine takes at least `--decode-ms` per decode step and the trainer at least
          `--step-seconds` per step, as larger models on machines of their own would: what they wait takes no CPU of
          this machine. Groups without variance are trained, too: dropped, they would let a step need ever more
          rollouts as the policy improves. The learning rate is half of the demo's: with few groups left that have a
          gradient, Adam makes each step as long as before, and a policy that earns .97 may collapse, with staleness
          and without. The same prompts for each seed, with `pacing.max_staleness` 0 and `--max-staleness`. Sixteen
          minutes for three seeds on two idle cores.

What `demo` compares; for each seed:

`waits`                 share of time in which the trainer had too few groups for a step, or waited for a publication.
`sooner`                ratio of the times to the end of the last full batch: both runs have trained the same number of
                        batches then, and have the score that the demo reports, if `held_out_difference` is small.
`score_difference`      what versions trained on equally many samples earned on average.
`held_out_difference`   what the last policies earn on 200 other problems.
`rise_sooner`           as `rise` below, of this seed alone. Not an aim: one seed's curve is too noisy.

And over all seeds:

`rise`                  ratio of the times at which the runs first had a policy with .9 of the rise, from what the
                        untrained policy earns to what the last one of the run without staleness earns on the 200
                        problems. A policy is there when the engines have it; what it earns is the mean reward of the
                        128 completions that it sampled, however much later they were trained. The curve is the mean
                        of the seeds, batch by batch, and of three batches in turn, and is interpolated: a single
                        batch lies up to .05 off, and single policies of this small model earn much less than the
                        ones before and after.

`per_step` says where a step's time goes, in milliseconds (medians): waiting for groups, training, waiting for the
publication before, and the rest (receiving and checking groups, recording, copying weights); `publish` is how long a
publication took, beside the next step. `by_step` has for each step its seconds since the first version, mean reward,
the trained version, and the mean version that sampled its tokens.

On a busy machine the paces do not hold, and a line says so: the ratios then depend on other work.

`--check` exits with 1 if a `ratio` is above 1.1, or if with staleness the trainer waits for 5 % of the time or more,
`sooner` or `rise` is below 1.5, or one of the differences is above .05.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog
from msgspec.structs import replace

from benchmarks.late import describe, trained_numbers
from workers.demo.prepare import prepare_run
from workers.demo.scores import score_policy
from workers.demo.task import held_out_rows
from workers.evaluate.temporary_engine import with_started_engine
from workers.launch.process import run_async
from workers.launch.specs import COMMANDS, ENGINE
from workers.launch.start import raise_for_failure, supervise
from workers.settings import Settings
from workers.train.checkpointing.checkpoint import CheckpointStore

ROLES = ("-m", "benchmarks.pipeline_roles")
BATCH, GROUP = 16, 8
CASES = ((1.0, 2.0), (1.5, 1.5), (2.0, 1.0), (0.5, 1.0))
"""Seconds of a batch's rollout, and of a step."""
WARM_STEPS = 3
"""Steps at the start that are not measured: the first ones find no group ready."""
RATIO, WAITS, SOONER, DIFFERENCE = 1.1, 0.05, 1.5, 0.05
HELD_OUT = 200
"""Problems on which the last policies are compared."""
RISE, WINDOW = 0.9, 3
"""Share of the rise, and batches that a point of the curve is the mean of."""


def run(settings: Settings, trainer: Sequence[str], engine: Sequence[str]) -> list[dict[str, Any]]:
    """Run to the end; return the metrics of every step.

    Args:
        settings: settings of the run.
        trainer: name and options of the trainer, of this benchmark.
        engine: the same for the engine.
    """
    with patch.dict(COMMANDS, {"train": (*ROLES, *trainer), ENGINE: (*ROLES, *engine)}):
        result = supervise(settings, quiet=True)
    raise_for_failure(result, settings)
    return [json.loads(line) for line in (settings.folder / "metrics.jsonl").read_text().splitlines()]


def measure_fixed(rollout_s: float, train_s: float, steps: int) -> dict[str, Any]:
    """Measure the time per step of one case."""
    with tempfile.TemporaryDirectory(prefix="penstock-pipeline-") as name:
        numbers = trained_numbers(steps * BATCH)
        settings = describe(Path(name).resolve(), numbers, batch_size=BATCH)
        settings = replace(settings, rollout=replace(settings.rollout, group_size=GROUP))
        engine = ("engine", "--seconds", str(rollout_s), "--slots", str(BATCH * GROUP))
        metrics = run(settings, ("trainer", "--seconds", str(train_s)), engine)
    ends = [step["time"] for step in metrics[WARM_STEPS:-1]]
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    return {
        "rollout_s": rollout_s,
        "train_s": train_s,
        "steps": len(ends) - 1,
        "step_s": round(step_s, 3),
        "ratio": round(step_s / max(rollout_s, train_s), 3),
        "per_step": parts_of_a_step(metrics[WARM_STEPS:-1]),
    }


def parts_of_a_step(metrics: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return where the time of a step goes, in milliseconds, medians over all steps but the first."""
    parts: dict[str, list[float]] = {}
    for before, step in pairwise(metrics):
        spent = {
            "waits": step["waiting_seconds"],
            "trains": step["seconds"],
            "waits_for_publication": step["publish/waiting_seconds"],
        }
        rest = step["time"] - before["time"] - sum(spent.values())
        for name, seconds in (spent | {"rest": rest, "publish": step["publish/seconds"]}).items():
            parts.setdefault(name, []).append(seconds)
    return {name: round(1000 * statistics.median(seconds)) for name, seconds in parts.items()}


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
            train=replace(settings.train, learning_rate=arguments.learning_rate),
        )
        engine = ("paced-engine", "--seconds", str(arguments.decode_ms / 1000))
        metrics = run(settings, ("paced-trainer", "--seconds", str(arguments.step_seconds)), engine)
        checkpoint = CheckpointStore(settings.folder / "checkpoints").latest()
        assert checkpoint is not None
        held_out = run_async(partial(score_held_out, settings, checkpoint.model))
    began = metrics[0]["publish/time"]  # version 0: rollouts begin
    full = metrics[:-1]  # the last step takes what is left
    waited_s = sum(step["waiting_seconds"] + step["publish/waiting_seconds"] for step in full[1:])
    return {
        "max_staleness": max_staleness,
        "steps": len(metrics),
        "seconds": round(full[-1]["time"] - began, 2),
        "waits": round(waited_s / (full[-1]["time"] - full[0]["time"]), 4),
        "per_step": parts_of_a_step(full),
        "held_out": round(held_out, 4),
        "by_version": by_version(metrics),
        "earned": [(round(seconds, 2), round(reward, 4)) for seconds, reward in earned(full, began)],
        "by_step": [
            [round(s["time"] - began, 2), round(s["reward/mean"], 3), s["version"], round(sampled_by(s), 2)]
            for s in metrics
        ],
    }


async def score_held_out(settings: Settings, model: Path) -> float:
    """Return the score of a policy on held-out problems, with an engine at full speed."""

    async def use(url: str, _version: int) -> float:
        return (await score_policy(settings, url, model, held_out_rows(HELD_OUT))).sampled

    return await with_started_engine(settings, model, use, settings.folder / "logs")


def sampled_by(step: dict[str, Any]) -> float:
    """Return the mean policy version that sampled the tokens of a step."""
    return max(0.0, step["version"] - step["staleness/mean"])


def by_version(metrics: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the mean reward that each policy version earned, by its number: how many batches it was trained on."""
    rewards: dict[int, list[float]] = {}
    for step in metrics:
        rewards.setdefault(round(sampled_by(step)), []).append(step["reward/mean"])
    return {version: round(statistics.mean(earned), 4) for version, earned in sorted(rewards.items())}


def earned(metrics: Sequence[dict[str, Any]], began: float) -> list[tuple[float, float]]:
    """Return for each batch the seconds after which engines had the policy that sampled it, and its mean reward.

    If two versions sampled a batch, its time lies between the times of both. Batches are in the order of these times.
    """
    published = {step["version"]: step["publish/time"] - began for step in metrics}
    batches = []
    for step in metrics:
        version, share = divmod(sampled_by(step), 1.0)
        since = published[int(version)]
        until = published.get(int(version) + 1, since)
        batches.append((since + share * (until - since), step["reward/mean"]))
    return sorted(batches)


def smooth(runs: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean curve of several runs, batch by batch, and of `WINDOW` batches in turn.

    >>> smooth([[(0, 0.0), (10, 0.25), (20, 0.5)], [(0, 0.25), (12, 0.5), (24, 0.75)]])
    [(11.0, 0.375)]
    """
    mean = [tuple(map(statistics.fmean, zip(*batches, strict=True))) for batches in zip(*runs, strict=False)]
    windows = [mean[i : i + WINDOW] for i in range(len(mean) - WINDOW + 1)]
    return [(statistics.fmean(t for t, _ in window), statistics.fmean(r for _, r in window)) for window in windows]


def time_to_score(curve: Sequence[tuple[float, float]], score: float) -> float:
    """Return the seconds until a curve first reached the score, interpolated; infinity if it never did."""
    for (before, low), (after, high) in pairwise(curve):
        if low < score <= high:
            return before + (after - before) * (score - low) / (high - low)
    return curve[0][0] if curve[0][1] >= score else float("inf")


def compare_rise(strict: Sequence[dict[str, Any]], overlapped: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Compare when runs without staleness and runs with staleness had a policy with `RISE` of the rise."""
    untrained = statistics.fmean(run["earned"][0][1] for run in (*strict, *overlapped))
    score = untrained + RISE * (statistics.fmean(run["held_out"] for run in strict) - untrained)
    without, with_staleness = (
        time_to_score(smooth([r["earned"] for r in runs]), score) for runs in (strict, overlapped)
    )
    return {
        "score": round(score, 4),
        "strict_s": round(without, 2),
        "overlapped_s": round(with_staleness, 2),
        "sooner": round(without / with_staleness, 2),
    }


def compare(overlapped: dict[str, Any], strict: dict[str, Any]) -> dict[str, float]:
    """Compare a run with staleness with one without."""
    both = overlapped["by_version"].keys() & strict["by_version"].keys()
    per_sample = statistics.mean(overlapped["by_version"][each] - strict["by_version"][each] for each in both)
    return {
        "waits": overlapped["waits"],
        "sooner": round(strict["seconds"] / overlapped["seconds"], 2),
        "score_difference": round(per_sample, 4),
        "held_out_difference": round(overlapped["held_out"] - strict["held_out"], 4),
        "rise_sooner": compare_rise([strict], [overlapped])["sooner"],
    }


def missed_aims(result: dict[str, Any]) -> list[str]:
    """Return what the aims are missed by; empty if every one is met."""
    missed = [
        f"{case['rollout_s']:g} s of rollout and {case['train_s']:g} s of training: {case['ratio']:.3f} above {RATIO:g}"
        for case in result.get("fixed", [])
        if case["ratio"] > RATIO
    ]
    for each in result.get("demo", []):
        seed, compared = f"seed {each['seed']}", each["compared"]
        if compared["waits"] >= WAITS:
            missed.append(f"{seed}: the trainer waits for {compared['waits']:.1%} of the time, not under {WAITS:.0%}")
        if not compared["sooner"] >= SOONER:
            missed.append(f"{seed}: the last batch {compared['sooner']:.2f} times sooner, below {SOONER:g}")
        missed += [
            f"{seed}: {name} {compared[name]:+.3f}, beyond {DIFFERENCE:g}"
            for name in ("score_difference", "held_out_difference")
            if abs(compared[name]) > DIFFERENCE
        ]
    if "rise" in result and not result["rise"]["sooner"] >= SOONER:
        missed.append(f"{RISE:g} of the rise {result['rise']['sooner']:.2f} times sooner, below {SOONER:g}")
    return missed


def main() -> None:
    """Measure, print, and check the aims with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="fixed,demo")
    parser.add_argument("--fixed-steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=32, help="steps that the demo's prompts suffice for")
    parser.add_argument("--decode-ms", type=float, default=32.0)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1.5e-4, help="of both runs")
    parser.add_argument("--step-seconds", type=float, default=3.4)
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
            strict, overlapped = (measure_demo(seed, most, arguments) for most in (0, arguments.max_staleness))
            compared = compare(overlapped, strict)
            result["demo"].append({"seed": seed, "strict": strict, "overlapped": overlapped, "compared": compared})
            print(seed, compared, file=sys.stderr, flush=True)
        strict, overlapped = ([each[name] for each in result["demo"]] for name in ("strict", "overlapped"))
        result["rise"] = compare_rise(strict, overlapped)
        print("rise", result["rise"], file=sys.stderr, flush=True)
        slowest_s = max(run["per_step"]["trains"] for run in (*strict, *overlapped)) / 1000
        if slowest_s > 1.1 * arguments.step_seconds:
            print(f"too busy: a step takes {slowest_s:.1f} s, not {arguments.step_seconds:g} s", file=sys.stderr)
    print(json.dumps(result, indent=None if arguments.json else 1))
    missed = missed_aims(result)
    print("verdict: missed: " + "; ".join(missed) if missed else "verdict: every aim is met", file=sys.stderr)
    if arguments.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
