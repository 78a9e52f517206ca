"""Figures and table of `advantage_bias.py`."""

from typing import Any

from benchmarks.masking.style import BLUE, COLORS, FAINT, INK, NAMES, ORANGE, figure, frame, save

Entries = list[dict[str, Any]]
TITLES = {"right answers only": "Failures hit right answers only", "any answer": "Failures hit any answer"}
SHOWN = "grpo"
"""The estimator that is drawn by success rate."""


def draw_figures(entries: Entries) -> None:
    """Draw both figures."""
    _bias(entries)
    _by_success(entries)


def table(entries: Entries) -> str:
    """Return a Markdown table: for each estimator the truth and both biases."""
    lines: list[str] = []
    for failures, title in TITLES.items():
        lines += [
            f"\n{title}:\n",
            "| estimator | answers | truth | masked: bias | wrong way | scored 0.0: bias | wrong way |",
        ]
        lines += ["|---|---|---:|---:|---:|---:|---:|"]
        for label in dict.fromkeys(entry["estimator"] for entry in entries):
            for right in (True, False):
                both = [_find(entries, failures, label, handling, right) for handling in ("masked", "scored zero")]
                told = [f"{_told(one['bias'])} | {100 * one['wrong_way'][0]:.0f} %" for one in both]
                who = "right" if right else "wrong"
                lines.append(f"| {label} | {who} | {both[0]['truth']:+.3f} | {' | '.join(told)} |")
    return "\n".join(lines)


def _told(pair: tuple[float, float]) -> str:
    return f"{pair[0]:+.4f} ± {pair[1]:.5f}"


def _find(entries: Entries, failures: str, label: str, handling: str, right: bool) -> dict[str, Any]:
    key = {"failures": failures, "estimator": label, "handling": handling, "right": right}
    return next(entry for entry in entries if key.items() <= entry.items())


def _bias(entries: Entries) -> None:
    labels = list(dict.fromkeys(entry["estimator"] for entry in entries))
    made = figure(10.5, 4.3)
    for axes, (failures, title) in zip(made.subplots(1, 2, sharex=True, sharey=True), TITLES.items(), strict=True):
        frame(axes, title, grid="x")
        axes.axvline(0, color=INK, linewidth=0.8)
        for row, label in enumerate(labels):
            for handling, right, shift in _MARKS:
                middle, half = _find(entries, failures, label, handling, right)["bias"]
                marker = {"marker": "o" if right else "s", "markersize": 6.5, "linestyle": "none"}
                face = {} if right else {"markerfacecolor": "white"}
                axes.errorbar(middle, row + shift, xerr=half, color=COLORS[handling], capsize=2.5, **marker, **face)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.45, -0.55)
        axes.set_xlabel("bias: mean advantage less its truth, of answers that bear loss")
        axes.tick_params(axis="y", length=0)
    for handling, right, shift in _MARKS:
        middle, _ = _find(entries, "right answers only", labels[0], handling, right)["bias"]
        left = middle > 0.45  # no room on the other side
        place = {"xytext": (-7 if left else 7, 0), "textcoords": "offset points", "ha": "right" if left else "left"}
        name = f"{NAMES[handling]}, {'right' if right else 'wrong'}"
        made.axes[0].annotate(name, (middle, shift), va="center", color=COLORS[handling], fontsize=8.5, **place)
    save(made, "masking_bias.png")


_MARKS = (("masked", True, -0.24), ("masked", False, -0.08), ("scored zero", True, 0.08), ("scored zero", False, 0.24))


def _by_success(entries: Entries) -> None:
    made = figure(10.5, 6.4)
    grid = made.subplots(2, 2, sharex=True, sharey="row")
    for column, (failures, title) in enumerate(TITLES.items()):
        for row, right in enumerate((True, False)):
            axes = grid[row][column]
            frame(axes, f"{title}: {'right' if right else 'wrong'} answers")
            axes.axhline(0, color=FAINT, linewidth=0.8)
            for handling, color in (("masked", BLUE), ("scored zero", ORANGE)):
                cells = _find(entries, failures, SHOWN, handling, right)["by_siblings_right"]
                cells = {int(k): cell for k, cell in cells.items() if cell["bias"]}
                middle = [cell["truth"] + cell["bias"][0] for cell in cells.values()]
                half = [cell["bias"][1] for cell in cells.values()]
                axes.plot(
                    list(cells), [cell["truth"] for cell in cells.values()], color=INK, linewidth=1.4, linestyle="--"
                )
                axes.errorbar(list(cells), middle, yerr=half, color=color, capsize=2.5, marker="o", markersize=4.5)
            if right:  # in the last round, those that were scored 0.0
                failed = [cell["advantage_failed"] for cell in cells.values()]
                middle, half = zip(*failed, strict=True)
                axes.errorbar(list(cells), middle, yerr=half, color=ORANGE, capsize=2.5, linestyle=":", marker=".")
        grid[1][column].set_xlabel("right answers in the group of 8, before any failure")
    _label(grid)
    for row in grid:
        row[0].set_ylabel(f"mean advantage ({SHOWN})")
    save(made, "masking_by_success.png")


def _label(grid: Any) -> None:
    """Label the lines where there is space."""
    bold = {"fontsize": 9.5, "fontweight": "bold"}
    left, right = grid[0]
    left.text(0.4, 1.75, "truth", color=INK, **bold)
    left.text(2.15, 1.98, "masked", color=BLUE, **bold)
    right.text(1.75, 1.95, "truth", color=INK, **bold)
    right.text(0.85, 1.6, "masked", color=BLUE, ha="right", va="center", **bold)
    for axes in grid[0]:
        axes.text(0.85, 1.22, "scored 0.0", color=ORANGE, ha="right", va="center", **bold)
        axes.text(0.9, -0.85, "of these, the failed ones", color=ORANGE, **bold)
    for axes in grid[1]:
        axes.text(5.6, -1.75, "truth", color=INK, ha="right", **bold)
        axes.text(7.15, -1.6, "masked", color=BLUE, va="center", **bold)
        axes.text(7.15, -0.87, "scored 0.0", color=ORANGE, va="center", **bold)
        axes.set_xticks(range(9))
        axes.set_xlim(-0.9, 8.6)
