"""Rows of numbers on disk, by partitions of their first number, so that one partition at a time fits in memory.

A file holds blocks, each ordered by partition; its index says where in each block each partition begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.flow.streams import write_bytes, write_stream


class Spill:
    """Takes rows of ``width`` uint64 and writes them by partition, a block for each call of :meth:`add`."""

    def __init__(self, stream: Any, width: int, num_partitions: int) -> None:
        self._stream, self._width, self._num_partitions = stream, width, num_partitions
        self._rows = 0
        self.starts: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> None:
        """Writes rows, uint64, shape (rows, width)."""
        assert rows.dtype == np.uint64 and rows.shape[1] == self._width
        partitions = rows[:, 0] % np.uint64(self._num_partitions)
        order = np.argsort(partitions, kind="stable")
        sizes = np.bincount(partitions.astype(np.int64), minlength=self._num_partitions)
        self.starts.append(self._rows + np.concatenate(([0], np.cumsum(sizes))))
        self._stream.write(np.ascontiguousarray(rows[order]).data)
        self._rows += len(rows)


@contextmanager
def spilling(path: Path, width: int, num_partitions: int) -> Iterator[Spill]:
    """A :class:`Spill` to ``path`` and ``path.index``."""
    with write_stream(path) as (stream, _):
        spill = Spill(stream, width, num_partitions)
        yield spill
    index = np.array(spill.starts, dtype=np.int64).reshape(-1, num_partitions + 1)
    write_bytes(path.with_name(path.name + ".index"), index.tobytes())


def read_partition(path: Path, width: int, num_partitions: int, partition: int) -> np.ndarray:
    """All rows of a partition in the order they were added: uint64, shape (rows, width)."""
    pieces = [np.empty((0, width), dtype=np.uint64)]
    place = path.with_name(path.name + ".index")
    if not place.stat().st_size:
        return pieces[0]
    index = np.memmap(place, dtype=np.int64, mode="r").reshape(-1, num_partitions + 1)
    with open(path, "rb") as file:
        for start, stop in index[:, partition : partition + 2]:
            if stop > start:
                file.seek(start * width * 8)
                pieces.append(np.fromfile(file, dtype=np.uint64, count=(stop - start) * width).reshape(-1, width))
    return np.concatenate(pieces)
