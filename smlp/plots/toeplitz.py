"""How Toeplitz-like a spatial matrix is: whether what it takes from another position depends on the distance alone.

Trained gMLPs have such matrices (gmlp.txt, figure 9): each is then a convolution over the positions. Here that is a
number.

Letters: ``T`` positions, ``d`` = i - j, the distance from an output position i back to an input position j, 0 .. T-1.
"""

from __future__ import annotations

import functools
import math

import numpy as np


def diagonal_sums(weight_TT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the weights and of their squares on each diagonal ``d`` of the lower triangle, (T,) float64 each."""
    size = weight_TT.shape[0]
    rows, columns, distance = _lower_triangle(size)
    weights = weight_TT[rows, columns].astype(np.float64)
    sums = np.bincount(distance, weights, size)
    return sums, np.bincount(distance, weights * weights, size)


@functools.lru_cache(maxsize=2)
def _lower_triangle(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, columns = np.tril_indices(size)
    return rows, columns, rows - columns


def toeplitz_share(weight_TT: np.ndarray) -> float:
    """The share of the energy (sum of squares) of ``tril(W)`` that its nearest Toeplitz matrix holds.

    The nearest lower-triangular Toeplitz matrix (least squares: the orthogonal projection) has the mean of each
    diagonal in all its places, so that the share is ``sum_d (T-d) mean_d**2 / sum_{j<=i} W_ij**2``: 1 for a Toeplitz
    matrix, 0 where every diagonal has mean zero, NaN for a matrix of zeros. What stands above the diagonal does not
    count.
    """
    sums, squares = diagonal_sums(weight_TT)
    energy = squares.sum()
    if energy == 0:
        return math.nan
    lengths = np.arange(len(sums), 0, -1)
    return float((sums * sums / lengths).sum() / energy)


def random_toeplitz_share(size: int) -> tuple[float, float]:
    """Mean and standard deviation of :func:`toeplitz_share` for a random T x T matrix: what "not at all" looks like.

    The projection is on T of the ``n = T(T+1)/2`` dimensions of lower-triangular matrices. For independent weights of
    one distribution that is symmetric about zero, such as that of untrained weights, each weight holds 1/n of the
    energy on average and products of two weights none, so that the mean is exactly ``T/n = 2/(T+1)``. For normal
    weights the share has the distribution ``Beta(T/2, (n-T)/2)``, of which the standard deviation is given.
    """
    n = size * (size + 1) / 2
    mean = size / n
    return mean, math.sqrt(mean * (1 - mean) / (n / 2 + 1))


def half_energy_distance(weight_TT: np.ndarray) -> int | None:
    """The smallest ``d`` such that the diagonals 0 .. d hold half of the energy of ``tril(W)``; None for zeros.

    Small where a filter looks at close tokens; about ``0.29 T`` for a random matrix.
    """
    _, squares = diagonal_sums(weight_TT)
    if squares.sum() == 0:
        return None
    return int(np.searchsorted(squares.cumsum(), squares.sum() / 2))
