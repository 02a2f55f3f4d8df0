"""Shared parts of all pictures: matplotlib, colours that print and that colour-blind readers tell apart, files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smlp.errors import UserError, one_line
from smlp.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FORMATS = ("png", "svg")
#: colour map for values from zero up
SEQUENTIAL = "cividis"
#: colour map for values around zero: orange below, purple above
DIVERGING = "PuOr"
#: colour of cells without a weight
NOTHING = "0.87"
#: Okabe and Ito's colour-blind-safe colours without their yellow, which is too pale for lines on white
OKABE_ITO = {
    "black": "#000000",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
}
#: colours of three lines; they also differ in brightness
LINES = (OKABE_ITO["blue"], OKABE_ITO["orange"], OKABE_ITO["black"])
_DPI = 120
_POINTS = 72  # per inch
_TITLE_SIZE = 11  # points
_LINE_HEIGHT = 1.2 * _TITLE_SIZE / _POINTS  # of a title, in inches
_MARGIN = 0.3  # total space to the left and right of a title, in inches


def check_matplotlib() -> None:
    """Raise UserError if matplotlib is missing; called before any long computation."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError('drawing needs matplotlib: pip install -e ".[plots]"') from error
    except ValueError as error:  # of the variable MPLBACKEND, or of a matplotlibrc
        raise UserError(f"matplotlib cannot start: {one_line(error)}") from error


def can_draw(name: str) -> bool:
    """Return whether matplotlib is there; if not, say why the picture ``name`` is missing."""
    try:
        check_matplotlib()
    except UserError as error:
        print(f"no {name}: {error}")
        return False
    return True


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return a figure of ``width`` x ``height`` inches with a title, made higher where the title needs more lines.

    Args:
        width, height: in inches.
        title: lines wider than the figure are broken.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    lines = broken(title, width - _MARGIN)
    added = len(lines) - len(title.split("\n"))
    figure = Figure(figsize=(width, height + added * _LINE_HEIGHT), dpi=_DPI, layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=_TITLE_SIZE, parse_math=False)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure, as PNG or SVG by the name's ending; the same figure gives the same bytes.

    Raises:
        UserError: the file cannot be written.
    """
    import matplotlib

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "smlp"}):
            metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
            figure.savefig(drawn := io.BytesIO(), metadata=metadata, format=path.suffix.removeprefix("."))
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise UserError(f"cannot write picture {path}: {error.strerror}") from None
    except ValueError as error:
        if "\0" not in str(path):
            raise
        raise UserError(f"cannot write picture {str(path)!r}: {error}") from None
    return path


def legend(place: Figure | Axes, *entries: Any, **options: Any) -> None:
    """Add a legend whose labels are text, which may hold dollar signs, and not mathematics."""
    for label in place.legend(*entries, **options).get_texts():
        label.set_parse_math(False)


def entry(name: str) -> str:
    """Return the label of a line: its name, also where it begins as those that matplotlib leaves out of legends."""
    return f" {name}" if name.startswith("_") else name


def plain_number(value: float, place: int | None = None) -> str:
    """Return the label of a tick of a logarithmic axis: the number itself, whole or not."""
    return f"{value:,.6g}" if value < 1e6 else f"{value:,.0f}"


def readable(symbols: Sequence[str]) -> list[str]:
    """Return symbols that the font can show; characters that it lacks become U+XXXX."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))

    def shown(character: str) -> str:
        known = font.get_char_index(ord(character)) and character.isprintable()
        return character if known else f"U+{ord(character):04X}"

    return ["".join(map(shown, symbol)) for symbol in symbols]


def label_ticks(axes: Axes, axis: str, names: Sequence[str], most: int, **text: Any) -> None:
    """Label the items of a heat map's "x" or "y" axis; every second, third, ... if there are more than ``most``."""
    step = -(-len(names) // most)
    ticks = np.arange(0, len(names), step)
    getattr(axes, f"set_{axis}ticks")(ticks, [names[tick] for tick in ticks], parse_math=False, **text)


def broken(title: str, width: float) -> list[str]:
    """Return a title with lines wider than ``width`` broken between words; needs matplotlib.

    Args:
        title: of one or several lines.
        width: in inches; words wider than that are cut in two.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    measure, font = TextToPath(), FontProperties(size=_TITLE_SIZE)

    def inches(line: str) -> float:
        return measure.get_text_width_height_descent(line, font, ismath=False)[0] / _POINTS

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
