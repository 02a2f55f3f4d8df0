"""Titles that fit above a picture, however long a model's name is."""

from __future__ import annotations

from collections.abc import Callable

_POINTS = 72  # of an inch


def broken(title: str, width: float, size: float) -> list[str]:
    """The lines of a title, broken further between words where they are wider than ``width``; needs matplotlib.

    Args:
        title: of one or several lines.
        width: in inches; only words wider than that are cut in two.
        size: of the letters, in points.
    """
    inches = _ruler(size)
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


def line_height(size: float) -> float:
    """Of a line of letters of ``size`` points, in inches."""
    return 1.2 * size / _POINTS


def _ruler(size: float) -> Callable[[str], float]:
    """Tells how wide a line of letters of ``size`` points is, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    measure, font = TextToPath(), FontProperties(size=size)

    def inches(line: str) -> float:
        return measure.get_text_width_height_descent(line, font, ismath=False)[0] / _POINTS

    return inches
