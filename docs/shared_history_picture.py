"""Draw the prefix tree and the mask on docs/training.md, light and dark: `python docs/shared_history_picture.py`.

Both are drawn from what the trainer makes of the three rows here (`workers/train/model/prefix_tree.py`).
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from workers.train.model.prefix_tree import PrefixTree

IMAGES = Path(__file__).parent / "images"
ROWS = tuple(f"Add two and three {response}".split() for response in ("It is five", "It is six", "call add two three"))
"""A group's rows: one prompt, and three responses, two of which begin alike."""


class Theme(NamedTuple):
    """The colors of the dashboard."""

    ground: str
    text: str
    quiet: str
    line: str
    by_rows: dict[int, str]
    """Ground of a place by the number of rows that share it."""


THEMES = {
    "light": Theme("#ffffff", "#1b2026", "#56616c", "#d9dee4", {3: "#9fc9f0", 2: "#a8dcd3", 1: "#f7d3b8"}),
    "dark": Theme("#14171a", "#e4e8ec", "#a0abb6", "#343b43", {3: "#1f5a94", 2: "#17655b", 1: "#7a4a1e"}),
}


def make_tree() -> tuple[PrefixTree, list[str]]:
    """Return the tree of the rows and the words by token id, numbered as they occur."""
    words = list(dict.fromkeys(word for row in ROWS for word in row))
    return PrefixTree.from_rows([np.array([words.index(word) for word in row]) for row in ROWS]), words


def count_rows(tree: PrefixTree) -> list[int]:
    """Return the number of rows that each place is in."""
    paths = [set(places[: len(row)].tolist()) for places, row in zip(tree.places_MT, ROWS, strict=True)]
    return [sum(place in path for path in paths) for place in range(len(tree.tokens_P))]


def draw_rows(axes: Axes, tree: PrefixTree, words: list[str], theme: Theme) -> None:
    """Draw the places by depth, each on the line of the first row that it is in."""
    paths, depths = tree.places_MT.tolist(), tree.depths_P.tolist()
    lines = [next(i for i, places in enumerate(paths) if place in places) for place in range(len(depths))]
    for row, places in zip(ROWS, paths, strict=True):
        for parent, child in pairwise(places[: len(row)]):
            bend = depths[parent] + 0.5
            xs = [depths[parent], bend, bend, depths[child]]
            axes.plot(xs, [-lines[parent]] * 2 + [-lines[child]] * 2, color=theme.quiet, linewidth=1.2, zorder=1)
    for place, rows in enumerate(count_rows(tree)):
        x, y = depths[place], -lines[place]
        style = {"boxstyle": "round,pad=0,rounding_size=0.1", "linewidth": 0}
        axes.add_patch(FancyBboxPatch((x - 0.38, y - 0.27), 0.76, 0.54, facecolor=theme.by_rows[rows], **style))
        axes.text(x, y, words[tree.tokens_P[place]], ha="center", va="center", color=theme.text)
        axes.text(x, y - 0.43, str(place), ha="center", va="center", color=theme.quiet, fontsize=8)
    axes.set_xlim(-0.6, max(depths) + 0.6)
    axes.set_ylim(-len(ROWS) + 0.4, 0.6)
    axes.set_aspect("equal")
    axes.set_anchor("NW")
    axes.set_axis_off()


def draw_mask(axes: Axes, tree: PrefixTree, words: list[str], theme: Theme) -> None:
    """Draw which place, a line, attends to which, a column."""
    count = len(tree.tokens_P)
    places = torch.arange(count)
    visible = (places <= places.unsqueeze(1)) & (places.unsqueeze(1) < tree.ends_P)
    rows = count_rows(tree)
    for q, k in visible.nonzero().tolist():
        axes.add_patch(Rectangle((k - 0.5, q - 0.5), 1, 1, facecolor=theme.by_rows[rows[k]], linewidth=0))
    labels = [words[token] for token in tree.tokens_P.tolist()]
    axes.set_xticks(range(count))
    axes.set_yticks(range(count), [f"{label}  {place}" for place, label in enumerate(labels)])
    axes.set_xticks(np.arange(-0.5, count), minor=True)
    axes.set_yticks(np.arange(-0.5, count), minor=True)
    axes.grid(which="minor", color=theme.line, linewidth=0.8)
    axes.tick_params(which="both", length=0, labelcolor=theme.text)
    axes.xaxis.tick_top()
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_aspect("equal")
    for spine in axes.spines.values():
        spine.set_color(theme.line)


def draw(theme: Theme) -> Figure:
    """Return the picture: the tree beside its mask."""
    tree, words = make_tree()
    figure = Figure(figsize=(10.4, 4.3), dpi=140, facecolor=theme.ground, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.35, 1])
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.04)
    for axes in (left, right):
        axes.set_facecolor(theme.ground)
    draw_rows(left, tree, words, theme)
    draw_mask(right, tree, words, theme)
    title = {"loc": "left", "fontsize": 10.5, "fontweight": "bold", "color": theme.text}
    left.set_title(f"{sum(map(len, ROWS))} tokens of three rows at {len(tree.tokens_P)} places", **title)
    right.set_title("A place (line) attends to places (columns)", **title)
    keys = {3: "in all three rows", 2: "in two rows", 1: "in one row"}
    patches = [Patch(facecolor=theme.by_rows[rows], label=label) for rows, label in keys.items()]
    left.legend(handles=patches, loc="lower left", frameon=False, labelcolor=theme.text, bbox_to_anchor=(0, -0.45))
    return figure


def main() -> None:
    """Draw both themes."""
    mpl.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9.5})
    for name, theme in THEMES.items():
        file = IMAGES / f"shared-history-{name}.webp"
        draw(theme).savefig(file, pil_kwargs={"lossless": True, "method": 6})


if __name__ == "__main__":
    main()
