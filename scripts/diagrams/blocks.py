"""The blocks that a model is a stack of: what a token's vector goes through."""

from __future__ import annotations

from diagrams.style import EXPERTS, GREY, INK, Drawing, light

_HEIGHT = 3.8
_DENSE, _MIX = light("#777777", 0.18), light(EXPERTS[0], 0.18)
_SPARSE = light(EXPERTS[1], 0.18)


def _chain(page: Drawing, y: float, x: float, boxes: list[tuple[str, float, object]]) -> float:
    """Draw boxes in a row with arrows between them; return where the last one ends."""
    for words, width, fill in boxes:
        page.arrow((x, y), (x + 2, y))
        page.box(x + 2, y - _HEIGHT / 2, width, _HEIGHT, words, INK, fill)
        x += 2 + width
    return x


def _residual(page: Drawing, y: float, start: float, end: float, below: float) -> None:
    """Draw the way around a sublayer, and the sum at its end."""
    page.path([(start, y), (start, y + below), (end, y + below), (end, y + 1.25)], GREY)
    page.circle(end, y, "+")


def gmlp() -> Drawing:
    """Draw the gMLP block with its spatial gating unit."""
    page = Drawing(94, 22)
    page.text(1.2, 1.5, "gMLP block", 9.5, ha="left", weight="bold")
    y, low = 8, 14
    page.text(2.6, y, "x")
    page.arrow((3.6, y), (6, y), head=False)
    split = _chain(page, y, 5.5, [("LN", 4, _DENSE), ("U: H to F", 9, _DENSE), ("GELU", 6, _DENSE)])
    page.arrow((split, y), (split + 3, y), head=False)
    split += 3
    page.arrow((split, y), (69, y), head=False)
    page.text(split + 3.4, y - 1.2, "z1: F/2", 8, GREY)
    page.path([(split, y), (split, low), (split + 2.5, low)], head=False)
    page.text(split - 3.6, low - 1.5, "z2: F/2", 8, GREY)
    gate = _chain(page, low, split + 2, [("LN", 4, _DENSE), ("tril(W) z2 + b", 15, _MIX)])
    page.path([(gate, low), (70, low), (70, y + 1.25)])
    page.circle(70, y, "×")
    end = _chain(page, y, 71.2, [("V: F/2 to H", 11, _DENSE)])
    page.arrow((end, y), (end + 1.7, y))
    page.text(gate - 7.5, low + 3, "mixes positions: W is T x T", 8, GREY)
    _residual(page, y, 5, end + 3, 11.2)
    page.arrow((end + 4.2, y), (end + 7.5, y))
    page.text(44, y + 12.4, "residual", 8, GREY)
    page.text(split + 12, 4, "spatial gating unit", 8, GREY)
    return page


def sparse() -> Drawing:
    """Draw sMLP's sparse block: the sMoE, then the tMoE."""
    page = Drawing(84, 31)
    page.text(1.2, 1.5, "sparse block of sMLP", 9.5, ha="left", weight="bold")
    y = 7.5
    page.text(5, y - 3.1, "sMoE: experts own features", 8.5, GREY, ha="left")
    page.text(2.6, y, "x")
    page.arrow((3.6, y), (6, y), head=False)
    boxes = [
        ("LN, LN", 6.5, _DENSE),
        ("features\nto experts", 9, _SPARSE),
        ("tril(Wi) z + bi", 13, _MIX),
        ("times z", 7, _MIX),
        ("back in place", 11, _SPARSE),
    ]
    end = _chain(page, y, 5.5, boxes)
    page.arrow((end, y), (end + 1.7, y))
    _residual(page, y, 5, end + 3, 5)
    page.text(35, y + 6.3, "residual", 8, GREY)
    top, y = y, 22
    page.path([(end + 4.2, top), (end + 9, top), (end + 9, top + 8), (3.4, top + 8), (3.4, y), (6, y)], head=False)
    page.text(5, y - 3.4, "tMoE: experts own tokens", 8.5, GREY, ha="left")
    boxes = [
        ("router:\nx · centroids", 11, _SPARSE),
        ("tokens\nto experts", 9, _SPARSE),
        ("LN, feed-forward\nof the expert", 14, _DENSE),
        ("back in place", 11, _SPARSE),
        ("times\nsigmoid(affinity)", 14, _SPARSE),
    ]
    end = _chain(page, y, 5.5, boxes)
    page.arrow((end, y), (end + 1.7, y))
    _residual(page, y, 5, end + 3, 5)
    page.arrow((end + 4.2, y), (end + 8, y))
    page.text(35, y + 6.3, "residual", 8, GREY)
    return page
