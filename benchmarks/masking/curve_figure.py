"""Figure and table of `held_out_curve.py`: means over seeds, and 95 % intervals by Student's t over pairs of runs."""

from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.masking.style import COLORS, FAINT, INK, NAMES, figure, frame, save

PLACES = {
    "prompts": (0, 32, 64, 96, 128, 192, 256, 400, 600, 800),
    "steps": (0, 1, 2, 3, 4, 6, 8, 10, 12, 15),
}
"""Where the curves are measured: by prompts that have met their end, trained or dropped, and by optimizer steps."""
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""By number of seeds."""
Run = dict[str, Any]
Curves = dict[int, dict[int, float]]
"""By seed, the score at each place."""


def wanted(run: Run) -> list[int]:
    """Return the steps whose policies need a score."""
    return sorted({policy_at(run, axis, place) for axis, places in PLACES.items() for place in places})


def policy_at(run: Run, axis: str, place: int) -> int:
    """Return the step of the run's policy at a position; 0 is the warm start, after the end it is the last step."""
    key = "ended" if axis == "prompts" else "step"
    return max((known["step"] for known in run["steps"] if known[key] <= place), default=0)


def curves(runs: list[Run], arm: str, axis: str) -> Curves:
    """Return the held-out scores of an arm, sampled at the run's temperature."""
    return {
        run["seed"]: {place: run["scores"][str(policy_at(run, axis, place))][0] for place in PLACES[axis]}
        for run in runs
        if run["arm"] == arm
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    if len(values) < 2:
        return mean(values), float("nan")
    return mean(values), T_975[len(values)] * stdev(values) / len(values) ** 0.5


def differences(one: Curves, other: Curves) -> dict[int, list[float]]:
    """Return paired differences at each position, one per common seed; at -1 those of the means after the start."""
    seeds = sorted(one.keys() & other.keys())
    places = list(one[seeds[0]]) if seeds else []
    result = {place: [one[seed][place] - other[seed][place] for seed in seeds] for place in places}
    return result | {-1: [mean(result[place][i] for place in places if place > 0) for i in range(len(seeds))]}


def draw(runs: list[Run]) -> None:
    """Print the results and draw the figures."""
    runs = [run for run in runs if {str(step) for step in wanted(run)} <= run["scores"].keys()]
    if not all(any(run["arm"] == arm for run in runs) for arm in ("masked", "scored zero")):
        return
    for axis in PLACES:
        _tell(runs, axis)
    _tell_runs(runs)
    made = figure(12.6, 7.2)
    for column, axis in enumerate(PLACES):
        _curves(made.add_subplot(2, 3, column + 1), runs, axis)
        _differences(made.add_subplot(2, 3, column + 4), runs, axis)
    _along(made.add_subplot(2, 3, 3), runs, "step", "Optimizer steps taken", "steps")
    _along(
        made.add_subplot(2, 3, 6), runs, "reward", "What the run itself tells", "mean reward of a step's completions"
    )
    save(made, "masking_held_out.png")


def _curves(axes: Any, runs: list[Run], axis: str) -> None:
    frame(axes, f"True score by {axis}")
    axes.set_ylabel("held-out problems, mean reward")
    for arm, color in COLORS.items():
        result = curves(runs, arm, axis)
        if not result:
            continue
        middle, half = zip(*(interval([curve[p] for curve in result.values()]) for p in PLACES[axis]), strict=True)
        axes.plot(PLACES[axis], middle, color=color, linewidth=1.8, marker="o", markersize=3.5, label=NAMES[arm])
        lower, upper = ([m + sign * h for m, h in zip(middle, half, strict=True)] for sign in (-1, 1))
        axes.fill_between(PLACES[axis], lower, upper, color=color, alpha=0.13, linewidth=0)
    _scale(axes, axis)
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right", title="mean of 5 seeds, 95 %", title_fontsize=8.5)


def _differences(axes: Any, runs: list[Run], axis: str) -> None:
    frame(axes, f"Masked less scored 0.0, by {axis}")
    axes.set_ylabel("paired difference of scores")
    paired = differences(curves(runs, "masked", axis), curves(runs, "scored zero", axis))
    for i in range(len(paired[-1])):
        axes.plot(PLACES[axis], [paired[p][i] for p in PLACES[axis]], color=FAINT, linewidth=0.8, alpha=0.7)
    middle, half = zip(*(interval(paired[p]) for p in PLACES[axis]), strict=True)
    axes.errorbar(
        PLACES[axis], middle, yerr=half, color=INK, linewidth=1.8, marker="o", markersize=4, capsize=3, zorder=3
    )
    axes.axhline(0, color=INK, linewidth=0.8)
    _scale(axes, axis)
    axes.set_ylim(-0.2, 0.2)
    axes.text(
        0.98,
        0.03,
        "black: mean, 95 %; grey: each seed",
        transform=axes.transAxes,
        ha="right",
        color=FAINT,
        fontsize=8.5,
    )


def _along(axes: Any, runs: list[Run], name: str, title: str, unit: str) -> None:
    frame(axes, title)
    axes.set_ylabel(unit)
    for run in runs:
        points = [(known["ended"], known[name]) for known in run["steps"] if known[name] is not None]
        axes.plot(*zip(*points, strict=True), color=COLORS[run["arm"]], linewidth=0.9, alpha=0.6)
    for arm, color in COLORS.items():
        ends = [mean(known[name] for known in run["steps"][-3:]) for run in runs if run["arm"] == arm]
        if ends:
            shift, top = _SHIFTS[name, arm], axes.get_ylim()[1]
            axes.text(825, mean(ends) + shift * top, NAMES[arm], color=color, ha="right", fontsize=8, fontweight="bold")
    _scale(axes, "prompts")
    axes.set_ylim(0, None if name == "step" else 1.1)


_SHIFTS = {
    ("step", "masked"): -0.12,
    ("step", "scored zero"): 0.04,
    ("step", "no failures"): 0.13,
    ("reward", "masked"): -0.08,
    ("reward", "scored zero"): -0.13,
    ("reward", "no failures"): 0.04,
}
"""Where an arm's name stands beside the end of its lines, in heights of the panel."""


def _scale(axes: Any, axis: str) -> None:
    if axis == "prompts":
        axes.set_xlabel("prompts that have met their end, of 800")
        axes.set_xscale("function", functions=(lambda x: np.sign(x) * abs(x) ** 0.5, lambda x: np.sign(x) * x**2))
        axes.set_xticks([0, 32, 96, 192, 400, 600, 800])
        axes.set_xlim(-1, 830)
    else:
        axes.set_xlabel("optimizer steps")
        axes.set_xticks([0, 2, 4, 6, 8, 10, 12, 15])
        axes.set_xlim(-0.4, 15.4)


def _tell(runs: list[Run], axis: str) -> None:
    result = {arm: curves(runs, arm, axis) for arm in COLORS if curves(runs, arm, axis)}
    paired = differences(result["masked"], result["scored zero"])
    print(f"\n| {axis} | " + " | ".join(NAMES[arm] for arm in result) + " | masked less scored 0.0 |")
    print("|---:|" + "---:|" * (len(result) + 1))
    for place in PLACES[axis]:
        means = [f"{mean(curve[place] for curve in of.values()):.3f}" for of in result.values()]
        print(f"| {place} | {' | '.join(means)} | {_told(paired[place])} |")
    means = [f"{mean(mean(list(curve.values())[1:]) for curve in of.values()):.3f}" for of in result.values()]
    print(f"| mean after the start | {' | '.join(means)} | {_told(paired[-1])} |")
    for arm in ("masked", "scored zero") if "no failures" in result else ():
        paired = differences(result[arm], result["no failures"])
        last = PLACES[axis][-1]
        print(f"{NAMES[arm]} less no failures: mean {_told(paired[-1])}, at {last} {_told(paired[last])}")


def _tell_runs(runs: list[Run]) -> None:
    """Print mean statistics of the runs of each arm."""
    for arm in COLORS:
        of = [run for run in runs if run["arm"] == arm]
        facts = {"steps": [len(run["steps"]) for run in of], "trained": [run["groups_trained"] for run in of]}
        for reason in sorted({reason for run in of for reason in run["groups_dropped"]}):
            facts[f"dropped:{reason}"] = [run["groups_dropped"].get(reason, 0) for run in of]
        for state in sorted({state for run in of for state in run["completions"]}):
            facts[f"% {state}"] = [100 * r["completions"].get(state, 0) / sum(r["completions"].values()) for r in of]
        facts["reward told in the last 3 steps"] = [mean(k["reward"] for k in run["steps"][-3:]) for run in of]
        print(f"\n{NAMES[arm]}, {len(of)} runs: " + ", ".join(f"{k} {mean(v):.4g}" for k, v in facts.items() if v))


def _told(values: list[float]) -> str:
    middle, half = interval(values)
    return f"{middle:+.3f} ± {half:.3f}"
