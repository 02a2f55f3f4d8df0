"""Pairs of duplicates to the one document of each group that is kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

_PAIRS_AT_ONCE = 1 << 20


def first_of_each(num_documents: int, files: Iterable[Path]) -> np.ndarray:
    """For each document the first of all that pairs join it with, over any number of steps; itself if there is none.

    A union-find whose steps are taken for many pairs at once: every document points to an earlier one or to itself;
    pairs make one root point to the other, until all pairs have one root.

    Args:
        num_documents: they are numbered from 0.
        files: of pairs, int64, read again and again, a piece at a time.

    Returns:
        uint32 (int64 above 4 billion documents), shape (num_documents,): memory is three times this.
    """
    files = list(files)
    kind = np.uint32 if num_documents < 1 << 32 else np.int64
    parent = np.arange(num_documents, dtype=kind)
    changed = True
    while changed:
        changed = False
        for path in files:
            for pairs in _pieces(path):
                first, second = parent[pairs[:, 0]], parent[pairs[:, 1]]
                different = first != second
                if different.any():
                    changed = True
                    low, high = np.minimum(first, second)[different], np.maximum(first, second)[different]
                    np.minimum.at(parent, high, low)
                    parent = _pointing_to_roots(parent)
    return parent


def _pointing_to_roots(parent: np.ndarray) -> np.ndarray:
    while True:
        further = parent[parent]
        if np.array_equal(further, parent):
            return parent
        parent = further


def _pieces(path: Path) -> Iterable[np.ndarray]:
    with open(path, "rb") as file:
        while True:
            pairs = np.fromfile(file, dtype=np.int64, count=2 * _PAIRS_AT_ONCE).reshape(-1, 2)
            if not len(pairs):
                return
            yield pairs
