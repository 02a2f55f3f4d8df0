"""Orders and choices that make pictures readable.

Letters: ``E`` items to be ordered, ``P`` entries of a profile.
"""

from __future__ import annotations

import numpy as np


def evenly(count: int, most: int) -> list[int]:
    """At most ``most`` of the numbers 0 .. count-1, spread evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(float(value)) for value in np.linspace(0, count - 1, most)})


def like_beside_like(profiles_EP: np.ndarray) -> list[int]:
    """An order of the rows in which like ones stand near each other.

    Rows are counts; two are as like as ``sum_p sqrt(q_p r_p)`` of their shares q and r (Bhattacharyya). The order is
    that of the second eigenvector of the Laplacian of these likenesses (the Fiedler vector), which makes the sum of
    squared distances between like rows small; rows that it does not tell apart go by the next eigenvectors. Rows
    without a count come last. The half with the fullest row comes first, so that an eigenvector's sign does not matter.
    """
    totals_E = profiles_EP.sum(axis=1)
    full = np.flatnonzero(totals_E > 0)
    empty = np.flatnonzero(totals_E == 0).tolist()
    if len(full) < 3:
        return [*sorted(full.tolist(), key=lambda row: -totals_E[row]), *empty]
    roots = np.sqrt(profiles_EP[full] / totals_E[full, None])
    # The constant keeps the graph in one piece; it moves no eigenvector but the constant one.
    likeness = roots @ roots.T + 1.0
    laplacian = np.diag(likeness.sum(axis=1)) - likeness
    vectors = np.linalg.eigh(laplacian)[1][:, 1:].round(6)
    if vectors[totals_E[full].argmax(), 0] > 0:
        vectors = -vectors
    return [*full[np.lexsort(vectors.T[::-1])].tolist(), *empty]
