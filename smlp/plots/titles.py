"""Figures whose titles fit, however long a model's name is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from smlp.drawing import TITLE_SIZE, check_matplotlib, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 72
#: of a line of a title, in inches
_LINE = 1.2 * TITLE_SIZE / _POINTS
#: left free at both sides together, in inches
_MARGIN = 0.3


def titled_figure(width: float, height: float, title: str) -> Figure:
    """A figure of ``width`` x ``height`` inches with a title; higher by the lines by which the title is too long.

    Args:
        width, height: in inches.
        title: its lines are broken further, between words, where they are wider than the figure.
    """
    lines = broken(title, width - _MARGIN)
    return new_figure(width, height + _LINE * (len(lines) - len(title.split("\n"))), "\n".join(lines))


def broken(title: str, width: float) -> list[str]:
    """The lines of a title, none of them wider than ``width`` inches; only words wider than that are cut in two."""
    inches = _ruler()
    lines: list[str] = []
    for paragraph in title.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if inches(longer) > width and line:
                lines.append(line)
                longer = word
            while inches(longer) > width and len(longer) > 1:
                fits = next(end for end in range(len(longer) - 1, 0, -1) if end == 1 or inches(longer[:end]) <= width)
                lines.append(longer[:fits])
                longer = longer[fits:]
            line = longer
        lines.append(line)
    return lines


def _ruler() -> Callable[[str], float]:
    """Tells how wide a line of a title is, in inches."""
    check_matplotlib()
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    measure, font = TextToPath(), FontProperties(size=TITLE_SIZE)

    def inches(line: str) -> float:
        return measure.get_text_width_height_descent(line, font, ismath=False)[0] / _POINTS

    return inches
