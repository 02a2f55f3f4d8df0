"""The sMoE: experts own features, and each mixes the positions of its own.

Letters: ``T`` positions, ``P`` of them in the prefix, ``H`` features, ``E`` experts.
"""

from __future__ import annotations

import math

import torch

from diagrams.style import EXPERTS, GREY, INK, WARNING, Drawing, light
from smlp.ops import balanced_assignment

NUM_POSITIONS, NUM_FEATURES, NUM_EXPERTS = 10, 8, 4
PREFIX = math.ceil(0.2 * NUM_POSITIONS)
_CELL, _TOP = 2.0, 6.6


def routed_features() -> list[int]:
    """Return the expert of each feature in one sequence, balanced, for scores drawn once."""
    scores_HE = torch.randn(NUM_FEATURES, NUM_EXPERTS, generator=torch.Generator().manual_seed(3))
    return balanced_assignment(scores_HE).tolist()


def _matrix(page: Drawing, x: float, experts: list[int], first_row: int) -> None:
    """Draw T x H, a column in the colour of its feature's expert; rows before ``first_row`` are grey."""
    for feature, expert in enumerate(experts):
        page.text(x + (feature + 0.5) * _CELL, _TOP - 0.9, str(expert + 1), 8, EXPERTS[expert], weight="bold")
    fills = [
        [light(EXPERTS[expert], 0.35) if row >= first_row else "#f4f4f4" for expert in experts]
        for row in range(NUM_POSITIONS)
    ]
    page.cells(x, _TOP, _CELL, fills)
    page.frame(x, _TOP, NUM_FEATURES * _CELL, NUM_POSITIONS * _CELL, GREY)


def _experts(page: Drawing, x: float, share: float) -> None:
    """Draw the spatial weights of each expert, T x T or smaller."""
    size = 4.2 * share
    for expert, color in enumerate(EXPERTS):
        y = _TOP - 0.4 + expert * 5.3
        page.triangle(x + 4.2 - size, y + 4.2 - size, size, color)
        page.text(x + 5.0, y + 2.1, f"W{expert + 1}", 9, color, ha="left", weight="bold")


def _layer(title: str, experts: list[int], first_row: int) -> Drawing:
    """Draw the way of a matrix of T x H through the experts and back."""
    page = Drawing(73, _TOP + NUM_POSITIONS * _CELL + 5.4)
    page.text(1.2, 1.5, title, 9.5, ha="left", weight="bold")
    left, right, middle = 8.5, 55, 33.5
    bottom = _TOP + NUM_POSITIONS * _CELL
    page.text(left + NUM_FEATURES * _CELL / 2, _TOP - 2.7, "expert of each feature", 8, GREY)
    page.text(4.6, _TOP + 1, "position 0", 8, GREY)
    page.text(4.6, bottom - 1, f"T - 1 = {NUM_POSITIONS - 1}", 8, GREY)
    _matrix(page, left, experts, first_row)
    page.text(left + NUM_FEATURES * _CELL / 2, bottom + 1.3, f"LN(x): H = {NUM_FEATURES} features", 8, GREY)
    page.text(middle + 5, _TOP - 2.7, "each expert mixes positions", 8, GREY)
    _experts(page, middle, 1 - first_row / NUM_POSITIONS)
    for y in (_TOP + 2, _TOP + 7.3, _TOP + 12.6, _TOP + 17.9):
        page.arrow((left + NUM_FEATURES * _CELL + 0.6, y - 0.3), (middle - 0.9, y - 0.3), GREY)
        page.arrow((middle + 9, y - 0.3), (right - 0.6, y - 0.3), GREY)
    _matrix(page, right, experts, first_row)
    page.text(right + NUM_FEATURES * _CELL / 2, bottom + 1.3, "back in place, added to x", 8, GREY)
    return page


def _note(page: Drawing, words: str, color: str = INK) -> None:
    page.text(1.2, _TOP + NUM_POSITIONS * _CELL + 3.7, words, 8.5, color, ha="left")


def deterministic() -> Drawing:
    """Draw chunks of neighbouring features, fixed when the model is built."""
    experts = [feature * NUM_EXPERTS // NUM_FEATURES for feature in range(NUM_FEATURES)]
    page = _layer("deterministic: features in fixed chunks", experts, 0)
    _note(page, "Expert i adds z * (tril(Wi) norm(z) + bi) for its features z. Nothing is routed. W is T x T.")
    return page


def partial() -> Drawing:
    """Draw routing that the prefix decides; the positions after it are mixed."""
    page = _layer("partial: routed by the first 20 % of the positions", routed_features(), PREFIX)
    page.frame(8.5, _TOP, NUM_FEATURES * _CELL, PREFIX * _CELL, INK, "////")
    page.text(4.6, _TOP + 3, f"to P - 1 = {PREFIX - 1}", 8, GREY)
    _note(page, "Hatched: read by the router, passed through, not predicted. Experts mix the rest: W is 0.8 T x 0.8 T.")
    return page


def leaky() -> Drawing:
    """Draw routing that all positions decide, including those to be predicted."""
    page = _layer("leaky: routed by all positions, even those to be predicted", routed_features(), PREFIX)
    page.frame(8.5, _TOP, NUM_FEATURES * _CELL, NUM_POSITIONS * _CELL, WARNING, "////")
    _note(page, "Hatched: read by the router. A later token changes an earlier prediction: a leak.", WARNING)
    return page
