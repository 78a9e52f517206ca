"""The demo, its controls, and a plain loop for comparison; each demo takes about five minutes on two cores."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.harness import balanced, environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

SEEDS = (1, 2, 3)
ROOT = Path(__file__).parents[2]


def demo(folder: Path, seed: int, *arguments: str) -> dict:
    command = [
        sys.executable,
        "-m",
        "penstock",
        "demo",
        "--seed",
        str(seed),
        "--folder",
        str(folder),
        "--json",
        *arguments,
    ]
    result = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = result.stdout.strip().splitlines()
    summary = json.loads(line)
    print(seed, arguments, summary)
    assert balanced(summary)
    return summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demos")


@pytest.fixture(scope="module")
def demos(folder):
    return {seed: demo(folder / f"demo-{seed}", seed) for seed in SEEDS}


def test_the_held_out_score_rises_for_every_seed(demos):
    for seed, summary in demos.items():
        assert summary["score_after"] - summary["score_before"] >= 0.35, (seed, summary)
        assert summary["score_after"] >= 0.75, (seed, summary)


def test_with_learning_rate_zero_nothing_is_learned(folder):
    summary = demo(folder / "zero", 1, "--control", "zero-lr")
    assert abs(summary["score_after"] - summary["score_before"]) < 0.05, summary


def test_with_rewards_swapped_between_completions_nothing_is_learned(folder, demos):
    summary = demo(folder / "permuted", 1, "--control", "permuted")
    assert demos[1]["score_after"] - summary["score_after"] >= 0.35, summary


def test_a_plain_synchronous_loop_reaches_the_same_score_with_equally_many_samples(folder, demos):
    plain = {}
    for seed in SEEDS:
        start = folder / f"plain-{seed}"
        subprocess.run(
            [sys.executable, "-m", "penstock", "demo", "--seed", str(seed), "--folder", str(start), "--prepare"],
            cwd=ROOT,
            env=environment(),
            check=True,
            capture_output=True,
            timeout=600,
        )
        # The same prompts, 16 a step, chosen and dropped as in the pipeline.
        steps = demos[seed]["fed"] // 16
        command = [sys.executable, str(ROOT / "tests" / "sync_grpo.py"), str(start / "model")]
        command += ["--steps", str(steps), "--seed", str(seed), "--threads", "1"]
        output = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=900, env=environment()
        ).stdout
        plain[seed] = json.loads(output)["after"]["sampled"]
        print(seed, "plain", plain[seed])
    real = mean(summary["score_after"] for summary in demos.values())
    assert abs(real - mean(plain.values())) <= 0.05, (real, plain)
