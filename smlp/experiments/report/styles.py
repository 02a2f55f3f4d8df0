"""How models look in figures: colours that print and that colour-blind readers tell apart, markers, line styles.

A family keeps its colour from experiment to experiment, unless several of its models are compared. Models of one colour
differ in line style, and all models in their marker, so that no two are told apart by colour alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smlp.experiments.report.runs import Model
from smlp.plots.drawing import OKABE_ITO

_FAMILY_COLOURS = {
    "dense_lm": "black",
    "gmlp_lm": "blue",
    "gmlp_moe": "blue",
    "smlp": "vermillion",
    "smlp_partial": "vermillion",
    "smlp_leaky": "vermillion",
    "gshard_lm": "green",
    "switch_lm": "orange",
    "base_lm": "purple",
    "hash_lm": "sky",
}
_OTHER = "0.45"
#: models that line styles and markers alone still tell apart, and of one family, whose curves are the most alike
_MOST_OF_A_COLOUR, _MOST_OF_A_FAMILY = 4, 2
_MARKERS = "osD^vPX<>hp*d8"
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3)))


@dataclass(frozen=True)
class Style:
    """Of one model's line."""

    colour: str
    marker: str
    line: Any

    def line_options(self, points: int, size: float = 5.0) -> dict[str, Any]:
        """For ``Axes.plot``: markers on at most about twelve points."""
        return {
            **{"color": self.colour, "linestyle": self.line, "linewidth": 1.5},
            **{"marker": self.marker, "markersize": size, "markevery": max(1, points // 12)},
            **{"markeredgecolor": "white", "markeredgewidth": 0.4},
        }


def styles(models: Sequence[Model], by_family: bool = True) -> dict[str, Style]:
    """By model name; in as many colours as there are without ``by_family``, where many would share one, or where a
    family has several models and there are colours for all."""
    colours = list(OKABE_ITO.values())
    families = Counter(model.family for model in models)
    shared = Counter(_FAMILY_COLOURS.get(model.family or "") for model in models)
    alike = len(models) <= len(colours) and max(families.values(), default=0) > _MOST_OF_A_FAMILY
    by_family = by_family and not alike and max(shared.values(), default=0) <= _MOST_OF_A_COLOUR
    found: dict[str, Style] = {}
    used: dict[str, int] = {}
    for place, model in enumerate(models):
        name = _FAMILY_COLOURS.get(model.family or "")
        colour = (OKABE_ITO[name] if name else _OTHER) if by_family else colours[place % len(colours)]
        line = _LINES[used.get(colour, 0) % len(_LINES)]
        used[colour] = used.get(colour, 0) + 1
        found[model.name] = Style(colour, _MARKERS[place % len(_MARKERS)], line)
    return found
