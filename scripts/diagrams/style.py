"""Draw what all diagrams share: colours, sizes, boxes, arrows, matrices.

A drawing's unit is a tenth of an inch, x to the right and y down. Text stays text in the SVG file. The ground is white,
so that a drawing looks alike on paper and on a dark page; what a colour says, a number or a word says too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

# Okabe and Ito's colours for all kinds of colour vision, as ink; lightened they fill boxes
EXPERTS = ("#0072B2", "#D55E00", "#009E73", "#9B4F96")
INK, GREY, PALE = "#1a1a1a", "#6b6b6b", "#eeeeee"
WARNING = "#B00020"

SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "smlp",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "hatch.linewidth": 0.6,
}


def light(color: str, share: float = 0.25) -> tuple[float, float, float]:
    """Mix a colour with white; ``share`` of the colour remains."""
    return tuple(1 - share * (1 - part) for part in matplotlib.colors.to_rgb(color))


class Drawing:
    """A white page, measured in tenths of an inch.

    Args:
        width: of the page.
        height: of the page.
    """

    def __init__(self, width: float, height: float) -> None:
        self.figure = plt.figure(figsize=(width / 10, height / 10), facecolor="white")
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def text(self, x: float, y: float, words: str, size: float = 9, color: str = INK, **more) -> None:
        """Write words centred on a point; ``ha="left"`` and the like are matplotlib's."""
        self.axes.text(x, y, words, **{"fontsize": size, "color": color, "ha": "center", "va": "center", **more})

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str = "",
        color: str = INK,
        fill: str | tuple = "white",
        size: float = 9,
        dashed: bool = False,
    ) -> None:
        """Draw a box with rounded corners, given by its upper left corner, with words in its middle."""
        style = "round,pad=0,rounding_size=0.6"
        line = {"edgecolor": color, "facecolor": fill, "linewidth": 1.1, "linestyle": "--" if dashed else "-"}
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, **line))
        if words:
            self.text(x + width / 2, y + height / 2, words, size)

    def arrow(
        self, start: tuple, end: tuple, color: str = INK, width: float = 1.1, dashed: bool = False, head: bool = True
    ) -> None:
        """Draw a straight arrow, or a line, from one point to another."""
        style = "-|>,head_width=2.2,head_length=3.5" if head else "-"
        line = {"color": color, "linewidth": width, "linestyle": (0, (4, 2)) if dashed else "-"}
        self.axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, shrinkA=0, shrinkB=0, **line))

    def path(self, points: Sequence[tuple], color: str = INK, head: bool = True) -> None:
        """Draw a line around corners, with an arrow at its end."""
        for start, end in itertools.pairwise(points[:-1]):
            self.arrow(start, end, color, head=False)
        self.arrow(points[-2], points[-1], color, head=head)

    def circle(self, x: float, y: float, sign: str) -> None:
        """Draw a small circle with a sign, where two ways meet."""
        self.axes.add_patch(plt.Circle((x, y), 1.15, edgecolor=INK, facecolor="white", linewidth=1.1, zorder=3))
        self.text(x, y, sign, 10, zorder=4)

    def cells(self, x: float, y: float, size: float, colors: Sequence[Sequence], lines: str = "white") -> None:
        """Draw a matrix of coloured squares; None leaves a cell empty."""
        for row, line in enumerate(colors):
            for column, color in enumerate(line):
                if color is not None:
                    place = (x + column * size, y + row * size)
                    self.axes.add_patch(Rectangle(place, size, size, facecolor=color, edgecolor=lines, linewidth=0.6))

    def frame(self, x: float, y: float, width: float, height: float, color: str = INK, hatch: str = "") -> None:
        """Draw the outline of a rectangle, hatched if asked."""
        line = {"edgecolor": color, "facecolor": "none", "linewidth": 1.1, "hatch": hatch}
        self.axes.add_patch(Rectangle((x, y), width, height, **line))

    def triangle(self, x: float, y: float, size: float, color: str) -> None:
        """Draw a lower-triangular matrix: what a position takes from itself and from earlier ones."""
        self.axes.add_patch(Polygon([(x, y), (x, y + size), (x + size, y + size)], facecolor=light(color, 0.45)))
        self.frame(x, y, size, size, color)

    def save(self, path: Path) -> None:
        """Write an SVG (or PNG, to look at) whose bytes depend on the drawing only."""
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {}
        self.figure.savefig(path, metadata=metadata, dpi=110, facecolor="white")
        plt.close(self.figure)
