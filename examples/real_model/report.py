"""Print the results of runs as a table, and draw their rewards: `python report.py runs/sums runs/sums-full`.

Scores are mean rewards on held-out problems, with 95 % intervals over problems. The time is from the end of the first
step to that of the last.
"""

import argparse
from pathlib import Path
from statistics import mean

import penstock
from workers.runs.evaluations import EvaluationResult, mean_interval, read_evaluations, read_groups

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe-Ito: color-blind safe


def score(folder: Path, result: EvaluationResult) -> str:
    """Return mean reward and interval, and the share of right answers."""
    interval = mean_interval(result.overall, result.version, read_groups(folder, result.step))
    bounds = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    right = result.overall.pass_at.get("1", {}).get("valid")
    return f"{result.overall.mean_valid:.2f}{bounds}, {right:.0%} right"


def row(folder: Path) -> str:
    """Return a run as one row of the table."""
    metrics, evaluations = penstock.open_run(str(folder)).metrics(), read_evaluations(folder)
    minutes = (metrics[-1]["time"] - metrics[0]["time"]) / 60
    scores = [score(folder, each) for each in (evaluations[0], evaluations[-1])]
    return f"| {folder.name} | {len(metrics)} | {scores[0]} | {scores[1]} | {minutes:.0f} min |"


def draw(folders: list[Path], file: Path) -> None:
    """Draw the mean reward of each step: seeds of a task in one color, and their mean."""
    from matplotlib.figure import Figure

    tasks: dict[str, list[list[float]]] = {}
    for folder in folders:
        steps = penstock.open_run(str(folder)).metrics()
        rewards = [each["reward/mean"] for each in steps if "reward/mean" in each]
        tasks.setdefault(folder.name.rpartition("-")[0] or folder.name, []).append(rewards)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for (task, runs), color in zip(tasks.items(), COLORS * len(tasks), strict=False):
        for rewards in runs if len(runs) > 1 else ():
            axes.plot(range(1, len(rewards) + 1), rewards, color=color, alpha=0.3, linewidth=0.9)
        means = [mean(step) for step in zip(*runs, strict=False)]
        axes.plot(range(1, len(means) + 1), means, color=color, linewidth=2, label=task)
    axes.set(xlabel="step", ylabel="mean reward in training")
    axes.grid(color="#e8e8e8")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--picture", type=Path, default=Path("runs/rewards.png"))
    options = parser.parse_args()
    print("| run | steps | before | after | time |")
    print("|---|---:|---|---|---:|")
    for folder in options.runs:
        print(row(folder))
    draw(options.runs, options.picture)
    print(options.picture)


if __name__ == "__main__":
    main()
