"""Train a pretrained model for hours while a process is killed every minute; report memory, scores and the account.

    python -m tests.soak.real_model --hours 2 --model examples/real_model/runs/models/smollm2 --seed 1 --json

The run is `penstock run` with two engines, three rollout workers and the tasks of `examples/real_model`. Exits with 1
if a prompt is lost or counted twice, a role's memory grows, the held-out score does not rise, or the run ends by
itself.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tomli_w

import penstock
from tests.soak.run import SERVER, begin, conclude, processes, run_parser
from workers.launch.specs import ENGINE, penstock_command
from workers.runs.evaluations import EvaluationResult, mean_interval, read_evaluations, read_groups

SLOTS = (SERVER, "feed", *["rollout"] * 3, "score", "train", *[ENGINE] * 2)
"""What may be killed; each process once in a round, in random order."""
KILL_S = 60.0
SAMPLE_S = 10.0
WARM_UP_S = 900.0
"""Until here caches fill, and each role has been started again at least once."""
MAX_GROWTH = 1.15
"""Largest ratio of a role's peak memory in the last third of the run to that in the first third after the warm-up."""
LEAST_GROWTH_MB = 30
"""Less is no growth: of a process of ten megabytes it would be a third."""
STOP_S = 180.0
"""How long a run that was asked to stop may take."""
_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "real_model"
_TASKS = '''\
"""One of three tasks for each seed."""

import sys

sys.path.append({example!r})
from tasks import Solved

TASKS = (
    ("basic_arithmetic", {{"min_terms": 2, "max_terms": 2, "max_digits": 1, "operators": ["+"],
                          "allow_negation": False, "allow_parentheses": False}}),
    ("gcd", {{"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20}}),
    ("word_sorting", {{"min_words": 2, "max_words": 2, "min_word_length": 3, "max_word_length": 6}}),
)


class Mixed:
    def __init__(self):
        self._tasks = [Solved(*task) for task in TASKS]

    def reset(self, seed: int):
        self._task = self._tasks[seed % len(TASKS)]
        return self._task.reset(seed)

    def get_reward(self, messages) -> float:
        return self._task.get_reward(messages)
'''


def write_settings(folder: Path, model: Path, seed: int) -> Path:
    """Write the project; returns the settings file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mixed.py").write_text(_TASKS.format(example=str(_EXAMPLE)))
    table = {
        "run": {"name": "soak", "seed": seed},
        "model": {"path": str(model.resolve())},
        "data": {"rows": 100_000},
        "environments": {"mixed": "mixed.py:Mixed"},
        "rollout": {"workers": 3, "groups_in_flight": 4, "group_size": 8, "max_turns": 1}
        | {"max_tokens_per_turn": 16, "max_tokens": 16},
        "engine": {"count": 2, "max_model_len": 768},
        "eval": {"rows": 100, "every": 20, "group_size": 2},
        "train": {"batch_size": 12, "learning_rate": 1e-4, "save_every": 2},
        "lora": {"rank": 16},
    }
    file = folder / "soak.toml"
    file.write_text(tomli_w.dumps(table))
    return file


@dataclass(kw_only=True)
class Watch:
    """Kills processes of a run, and samples the memory of each role."""

    parent: int
    """Process id of the supervisor."""
    chance: random.Random
    killed: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    """Seconds since the start, and the largest process of each role, in bytes; shared pages are divided (PSS)."""
    _round: list[str] = field(default_factory=list)

    def watch(self, seconds: float, is_running: Callable[[], bool]) -> None:
        """Kill and sample for so long, or until the run has ended."""
        began = time.monotonic()
        next_kill = KILL_S * 2  # every role has started
        while (now := time.monotonic() - began) < seconds and is_running():
            self.samples.append((now, self._memory()))
            if next_kill <= now < seconds - KILL_S:
                next_kill += KILL_S
                self._kill()
            time.sleep(SAMPLE_S)

    def _kill(self) -> None:
        if not self._round:
            self._round = self.chance.sample(SLOTS, len(SLOTS))
        role = self._round.pop()
        time.sleep(self.chance.uniform(0, SAMPLE_S))
        if pids := sorted(processes(self.parent).get(role, set())):
            os.kill(self.chance.choice(pids), signal.SIGKILL)
            self.killed[role] += 1

    def _memory(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for role, pids in processes(self.parent).items():
            for pid in pids:
                try:
                    found[role] = max(found.get(role, 0), psutil.Process(pid).memory_full_info().pss)
                except psutil.Error:  # it has just ended
                    continue
        return found


def memory_report(samples: Sequence[tuple[float, dict[str, int]]]) -> dict[str, dict[str, float]]:
    """Return the peak of each role in MB in the three thirds after the warm-up, and the last by the first."""
    warm = [(at, found) for at, found in samples if at >= min(WARM_UP_S, samples[-1][0] / 3)]
    size = max(1, len(warm) // 3)
    thirds = [warm[:size], warm[size : 2 * size], warm[2 * size :]]
    report = {}
    for role in sorted({role for _, found in warm for role in found}):
        peaks = [max((found.get(role, 0) for _, found in third), default=0) / 1e6 for third in thirds]
        growth = peaks[-1] / peaks[0] if peaks[0] else 0.0
        report[role] = {"first": peaks[0], "second": peaks[1], "last": peaks[2], "growth": growth}
    return {role: {name: round(value, 3) for name, value in row.items()} for role, row in report.items()}


def score(folder: Path, result: EvaluationResult) -> dict[str, Any]:
    """Return an evaluation's step, mean reward and 95 % interval."""
    interval = mean_interval(result.overall, result.version, read_groups(folder, result.step))
    return {"step": result.step, "mean": result.overall.mean_valid, "interval": interval}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, kill, sample, judge; returns the exit code."""
    parser = run_parser(__doc__, groups=0, limit_s=0)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--model", type=Path, required=True, help="folder that make_model.py has written")
    options = parser.parse_args(arguments)
    folder = begin(options, "real-model")
    file = write_settings(folder, options.model, options.seed)
    with (folder / "output.txt").open("w") as output:
        command = [*penstock_command(), "run", file.name]
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        watch = Watch(parent=process.pid, chance=random.Random(options.seed))
        watch.watch(options.hours * 3600, lambda: process.poll() is None)
        ended_early = process.poll() is not None
        if not ended_early:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return report(options, folder, watch, ended_early=ended_early)


def report(options: argparse.Namespace, folder: Path, watch: Watch, *, ended_early: bool) -> int:
    """Audit the stopped run and judge it; returns the exit code."""
    run = folder / "runs" / "soak"
    audited = subprocess.run([*penstock_command(), "audit", str(run), "--json"], capture_output=True, check=False)
    account = json.loads(audited.stdout or "{}")
    evaluations = read_evaluations(run)
    scores = [score(run, each) for each in (evaluations[0], evaluations[-1])] if evaluations else []
    metrics = penstock.open_run(str(run)).metrics()
    memory = memory_report(watch.samples)
    found = {
        "hours": options.hours,
        "seed": options.seed,
        "kills": dict(sorted(watch.killed.items())),
        "steps": metrics[-1]["step"] if metrics else 0,
        "memory_mb": memory,
        "scores": scores,
        "held_out": [[each.step, each.overall.mean_valid] for each in evaluations],
        "audit": account,
    }
    grown = [
        role
        for role, row in memory.items()
        if row["growth"] > MAX_GROWTH and row["last"] - row["first"] > LEAST_GROWTH_MB
    ]
    has_risen = len(scores) == 2 and scores[0]["interval"][1] < scores[1]["interval"][0]
    problems = {
        "the run ended by itself": ended_early,
        "the account is not clean": not account.get("clean"),
        f"memory has grown: {grown}": bool(grown),
        "the held-out score has not risen": not has_risen,
    }
    return conclude(options, folder, found, "; ".join(name for name, holds in problems.items() if holds))


if __name__ == "__main__":
    sys.exit(main())
