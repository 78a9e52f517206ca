"""Compare Penstock and TRL on the same tasks: `python compare_with_trl.py sums --seeds 1 2 3`.

Runs follow each other, each alone on the machine; one that has ended is not run again. Then it prints the table and
draws `runs/compared.png`. TRL has a virtual environment of its own:

    python -m venv runs/trl && runs/trl/bin/pip install trl peft reasoning-gym
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean

import psutil

COLORS = {"Penstock": "#0072B2", "TRL": "#D55E00"}  # Okabe-Ito: color-blind safe
SMOOTHED = 3
"""Steps in the mean of which a score counts as reached."""
LIMIT_S = 3 * 3600.0


def run(command: list[str | Path], folder: Path) -> None:
    """Run a command to its end, and write its time, CPU seconds and peak memory to a file.

    Memory is the sum over its processes, with each shared page counted once (PSS), looked at every two seconds.
    """
    if Path(f"{folder}.usage").exists():
        return
    print("running:", *command, flush=True)
    began, before, peak = time.time(), _cpu_s(), 0
    with Path(f"{folder}.log").open("w") as log:
        process = psutil.Popen([str(part) for part in command], stdout=log, stderr=log)
        while process.poll() is None:
            if time.time() - began > LIMIT_S:
                process.terminate()
            peak = max(peak, _memory(process))
            time.sleep(2)
    if process.returncode:
        sys.exit(f"it ended with {process.returncode}: {folder}.log")
    figures = {"began": began, "seconds": time.time() - began, "cpu_s": _cpu_s() - before, "bytes": peak}
    Path(f"{folder}.usage").write_text(json.dumps(figures))


def _cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return times.children_user + times.children_system


def _memory(process: psutil.Process) -> int:
    total = 0
    for each in [process, *process.children(recursive=True)]:
        try:
            total += each.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total


class Finished:
    """A finished run of either: its rewards by time since the command was given."""

    def __init__(self, folder: Path) -> None:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.usage = json.loads(Path(f"{folder}.usage").read_text())
        rows = [each for each in rows if "reward/mean" in each]
        self.times = [each["time"] - self.usage["began"] for each in rows]
        rewards = [each["reward/mean"] for each in rows]
        self.rewards = [mean(rewards[max(0, n - SMOOTHED + 1) : n + 1]) for n in range(len(rewards))]

    def seconds_to(self, score: float) -> float:
        """Return when the mean of some steps first reached a score."""
        return next(at for at, each in zip(self.times, self.rewards, strict=True) if each >= score)

    def steps_to(self, score: float) -> int:
        """Return the number of steps until then."""
        return next(n for n, each in enumerate(self.rewards, 1) if each >= score)

    def step_s(self, score: float) -> float:
        """Return the mean time of a step until then, without the first."""
        return (self.seconds_to(score) - self.times[0]) / max(1, self.steps_to(score) - 1)


def compare(task: str, seeds: list[int], trl: Path, steps: int) -> dict[str, list[Finished]]:
    """Run what has not run yet; return the finished runs of both."""
    found: dict[str, list[Finished]] = {"Penstock": [], "TRL": []}
    for seed in seeds:
        ours, theirs = Path(f"runs/{task}-{seed}"), Path(f"runs/{task}-trl-{seed}")
        names = ["--set", f"run.name={ours.name}", "--set", f"run.seed={seed}"]
        run(["penstock", "run", f"{task}.toml", *names], ours)
        script = [trl, "train_with_trl.py", f"{task}.toml", theirs, "--seed", str(seed), "--steps", str(steps)]
        run(script, theirs)
        found["Penstock"].append(Finished(ours))
        found["TRL"].append(Finished(theirs))
    return found


def rows(task: str, found: dict[str, list[Finished]]) -> list[str]:
    """Return rows of the table, at the highest score that all runs reached, and at half the way to it."""
    everyone = [each for runs in found.values() for each in runs]
    start, top = mean(each.rewards[0] for each in everyone), min(max(each.rewards) for each in everyone)
    lines = []
    for score in ((start + top) / 2, top):
        for name, runs in found.items():
            seconds = [each.seconds_to(score) for each in runs]
            steps, step_s = mean(each.steps_to(score) for each in runs), mean(each.step_s(score) for each in runs)
            lines.append(
                f"| {task} | {score:.2f} | {name} | {mean(seconds):.0f} s ({min(seconds):.0f} to {max(seconds):.0f}) | "
                f"{steps:.0f} | {step_s:.1f} s | "
                f"{mean(each.usage['cpu_s'] / each.usage['seconds'] for each in runs):.2f} | "
                f"{max(each.usage['bytes'] for each in runs) / 1e9:.1f} GB |"
            )
    return lines


def draw(tasks: dict[str, dict[str, list[Finished]]], file: Path) -> None:
    """Draw the reward of every run by time, and by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), 2, squeeze=False)
    for (task, found), (by_time, by_step) in zip(tasks.items(), axes, strict=True):
        for name, runs in found.items():
            for number, each in enumerate(runs):
                label = name if number == 0 else None
                by_time.plot([at / 60 for at in each.times], each.rewards, color=COLORS[name], label=label)
                by_step.plot(range(1, len(each.rewards) + 1), each.rewards, color=COLORS[name], label=label)
        by_time.set(xlabel="minutes since the command", ylabel="mean reward in training", title=task)
        by_step.set(xlabel="step", title=task)
        for each in (by_time, by_step):
            each.grid(color="#e8e8e8")
            each.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", help="settings files, without .toml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--trl", type=Path, default=Path("runs/trl/bin/python"), help="Python that has TRL")
    parser.add_argument("--trl-steps", type=int, default=0, help="default: as many as Penstock's")
    parser.add_argument("--picture", type=Path, default=Path("runs/compared.png"))
    options = parser.parse_args()
    tasks = {task: compare(task, options.seeds, options.trl, options.trl_steps) for task in options.tasks}
    print("| task | mean reward | | time until it is reached | steps until then | a step | CPUs | memory |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for task, found in tasks.items():
        print(*rows(task, found), sep="\n")
    draw(tasks, options.picture)
    print(options.picture)


if __name__ == "__main__":
    main()
