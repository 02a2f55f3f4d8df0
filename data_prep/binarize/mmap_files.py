"""fairseq's ``.bin`` and ``.idx`` of the mmap kind, written; :mod:`smlp.text.binarized` has the format.

Letters: ``N`` tokens, ``L`` lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from smlp.text.binarized import HEADER, MAGIC, TOKEN_TYPES

_CODES = {np.dtype(name): code for code, name in TOKEN_TYPES.items()}


def token_type(vocab_size: int) -> np.dtype:
    """The integers that fairseq chooses for ids of a dictionary of so many symbols."""
    return np.dtype("<u2" if vocab_size < 65500 else "<u4" if vocab_size < 2**32 - 1 else "<i8")


def with_ends(ids_N: np.ndarray, lengths_L: np.ndarray, end: int, dtype: np.dtype) -> np.ndarray:
    """The ids of lines, each followed by ``end``, (N + L,)."""
    last_L = np.cumsum(lengths_L + 1) - 1
    stream = np.empty(len(ids_N) + len(lengths_L), dtype)
    is_token = np.ones(len(stream), bool)
    is_token[last_L] = False
    stream[is_token] = ids_N
    stream[last_L] = end
    return stream


def index_content(
    dtype: np.dtype, num_lines: int, lengths: Callable[[], Iterable[np.ndarray]]
) -> Iterator[bytes | memoryview]:
    """What an ``.idx`` consists of, block by block.

    Args:
        dtype: of the tokens.
        num_lines: in all.
        lengths: gives the lines' lengths in tokens, with their ``</s>``, in blocks; called twice.
    """
    yield MAGIC + HEADER.pack(1, _CODES[dtype], num_lines)
    for lengths_L in lengths():
        yield lengths_L.astype("<i4").tobytes()
    position = 0
    for lengths_L in lengths():
        ends_L = position + np.cumsum(lengths_L, dtype=np.int64) * dtype.itemsize
        yield np.concatenate([[position], ends_L[:-1]]).astype("<i8").tobytes()
        position = int(ends_L[-1])
