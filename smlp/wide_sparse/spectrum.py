"""Largest singular values of random weights: sparse, dense, permuted and causal ones (Hayase and Karakida, 2024, 4.3).

Letters: ``m`` width, ``p`` density of a mask, ``g`` expansion gamma of a hidden layer, ``T`` positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from smlp.config.settings import require
from smlp.wide_sparse.counts import mixer_tokens

#: edge of the singular values of ``tril(W)`` with independent entries of variance 1/T, for large T (Dykema and
#: Haagerup, 2004, call the limit the quasinilpotent DT operator); 2 is that of the whole matrix
CAUSAL_EDGE = math.sqrt(math.e)


def dense_edge(expansion: float) -> float:
    """Return ``c = 1 + sqrt(g)``, the edge of a g*m x m matrix of variance 1/m: Marchenko and Pastur's law.

    It is also that of a Mixer's wide, sparse matrices: neither a Kronecker product with the identity nor a permutation
    changes a singular value other than how often it occurs.
    """
    return 1 + math.sqrt(expansion)


def sparse_edge(width: int, density: float, expansion: float, as_printed: bool = False) -> float:
    """Return the edge of a masked g*m x m matrix, the root of equation (17).

    ``L = c^2 + 3 c^2 sqrt(g) (1 - p) / q^2``, for entries that are normal with variance ``1/(p m)`` with probability
    p and zero otherwise. The paper has ``q^2 = p m``; what random matrices show needs ``q^2 = p g m``.

    Args:
        width, density, expansion: m, p, g.
        as_printed: take the paper's q.
    """
    require(0 < density <= 1, f"the density must be above 0 and at most 1, got {density}")
    edge, q2 = dense_edge(expansion), density * width * (1 if as_printed else expansion)
    return edge * math.sqrt(1 + 3 * math.sqrt(expansion) * (1 - density) / q2)


def largest_singular_value(matrix: Tensor) -> float:
    """Return the largest singular value of a matrix, in float64."""
    matrix = matrix.detach().double()
    square = matrix @ matrix.t() if matrix.size(0) < matrix.size(1) else matrix.t() @ matrix
    return math.sqrt(max(float(torch.linalg.eigvalsh(square)[-1]), 0.0))


def masked_sample(width: int, density: float, expansion: float, generator: torch.Generator) -> Tensor:
    """Return a random masked matrix, (g*m, m) float64, as :func:`sparse_edge` describes."""
    shape = (round(expansion * width), width)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(density * width)
    return values * (torch.rand(shape, generator=generator, dtype=torch.float64) < density)


def sparse_rows(
    omega: float, expansion: float, channels: Iterable[int], trials: int = 3, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the numbers of Figure 4 (right): widening with fixed connections raises the edge of a masked MLP alone.

    Args:
        omega: connections of a layer.
        expansion: g.
        channels: values of C; S follows from equation (14).
        trials: random matrices for each; 0 for the formulas only.
        seed: of the first.

    Returns:
        Rows with ``channels``, ``tokens``, ``width``, ``density``, the edges ``mixer``, ``formula`` and ``printed``,
        and ``measured``, the mean largest singular value (None without trials).
    """
    rows = []
    for count in channels:
        tokens = round(mixer_tokens(omega, count, expansion))
        width = tokens * count
        density = omega / (expansion * width**2)
        found = [
            largest_singular_value(
                masked_sample(width, density, expansion, torch.Generator().manual_seed(seed + trial))
            )
            for trial in range(trials)
        ]
        rows.append(
            {
                "channels": count,
                "tokens": tokens,
                "width": width,
                "density": density,
                "mixer": dense_edge(expansion),
                "formula": sparse_edge(width, density, expansion),
                "printed": sparse_edge(width, density, expansion, as_printed=True),
                "measured": sum(found) / trials if trials else None,
            }
        )
    return rows


def scaled_largest(weight_TT: Tensor, is_causal: bool) -> float | None:
    """Return the largest singular value of a T x T matrix whose weights are scaled to variance 1/T; None for zeros.

    Args:
        weight_TT: a matrix.
        is_causal: whether its lower triangle alone counts, in the variance too.
    """
    weight_TT = weight_TT.detach().double()
    size = len(weight_TT)
    if is_causal:
        weight_TT = weight_TT.tril()
    count = size * (size + 1) / 2 if is_causal else size * size
    energy = float(weight_TT.square().sum()) / count
    return largest_singular_value(weight_TT) / math.sqrt(size * energy) if energy else None
