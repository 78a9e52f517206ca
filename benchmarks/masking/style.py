"""Style of this study's figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[2] / "docs" / "images"
BLUE, ORANGE, INK, FAINT = "#0072B2", "#D55E00", "#333333", "#9a9a9a"  # Okabe and Ito: told apart by everybody
COLORS = {"masked": BLUE, "scored zero": ORANGE, "no failures": INK}
NAMES = {"masked": "masked", "scored zero": "scored 0.0", "no failures": "no failures"}


def figure(width: float, height: float) -> "Figure":
    """Return an empty figure on white."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": INK, "axes.labelcolor": INK})
    made = Figure(figsize=(width, height), dpi=140, facecolor="white", layout="constrained")
    made.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.04, hspace=0.04)  # type: ignore[call-arg]
    return made


def frame(axes: "Axes", title: str, grid: str = "y") -> None:
    """Draw title, grid and two sides of the frame."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelcolor=INK, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(FAINT)


def save(made: "Figure", name: str, **options: Any) -> None:
    """Save the figure in the folder of the docs' images."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    made.savefig(IMAGES / name, **options)
    print(f"drawn: docs/images/{name}")
