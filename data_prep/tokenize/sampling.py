"""Draw a sample of documents that depends only on the files, their texts and a seed, whatever the workers.

Each part draws a share by its size on disk, its documents with the smallest hashes, and at least one; of all that are
drawn, those with the smallest hashes are the sample.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.flow.documents import NOT_TEXT, ReadSettings, counted_records
from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.parts import FilePart
from data_prep.flow.running import STATE
from data_prep.flow.streams import open_stream, write_stream

NOT_DRAWN = "not drawn"


def rank_of(text: str, seed: int) -> int:
    """Return the 64-bit hash of a text by which documents are drawn."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest)


class _Smallest:
    """Keep the items of the smallest ranks: as many as fill ``num_bytes``, and at least one."""

    def __init__(self, num_bytes: float) -> None:
        self._num_bytes, self._size = num_bytes, 0
        self._kept: list[tuple[int, int, Any]] = []  # a heap, the largest rank first

    def add(self, rank: int, num_bytes: int, item: Any) -> None:
        """Add an item of a size; of two with one rank, the smaller item goes first when there is too much."""
        heapq.heappush(self._kept, (-rank, num_bytes, item))
        self._size += num_bytes
        while self._size - self._kept[0][1] >= self._num_bytes and len(self._kept) > 1:
            self._size -= heapq.heappop(self._kept)[1]

    def items(self) -> list[tuple[int, Any]]:
        """Return what is kept, with its ranks, smallest first."""
        return [(-rank, item) for rank, _, item in sorted(self._kept, reverse=True)]


def sample_part(part: FilePart, out: Path, reading: ReadSettings, num_bytes: int, total: int, seed: int) -> PartResult:
    """Write the documents of a part with the smallest hashes, smallest first.

    The part's share of the sample's ``num_bytes`` is that of its size in the ``total`` on disk of all parts; the last
    document fills it or goes beyond. What is drawn is held in memory.
    """
    smallest = _Smallest(num_bytes * part.num_bytes / total)
    counts, defects = Counts(), []
    for piece in counted_records(part, reading, counts, defects):
        try:
            length = len(piece.text.encode())
        except UnicodeEncodeError:
            counts.drop(NOT_TEXT)
            continue
        counts.keep()
        smallest.add(rank_of(piece.text, seed), length, piece.text)
    drawn = smallest.items()
    leave_out(counts, counts.kept - len(drawn))
    with write_stream(out / STATE / "drawn" / f"{part.name}.jsonl.gz") as (stream, written):
        for row in drawn:
            stream.write((json.dumps(row) + "\n").encode())
    return PartResult([written.row(out)], counts, defects)


def leave_out(counts: Counts, number: int) -> None:
    """Count so many kept documents as not drawn."""
    counts.kept -= number
    if number:
        counts.dropped[NOT_DRAWN] += number


@dataclass(frozen=True)
class Sample:
    """The documents of the sample, on disk."""

    files: Sequence[Path]  # what :func:`sample_part` wrote for all parts, in their order
    numbers: frozenset[int]  # of the documents among all that were drawn, counted from 0
    num_drawn: int  # how many were drawn

    @classmethod
    def of(cls, files: Sequence[Path], num_bytes: int) -> Sample:
        """Choose the documents of the smallest ranks that fill ``num_bytes``, or all there are; at least one.

        Memory holds a few numbers for each, no text.
        """
        smallest, number = _Smallest(num_bytes), 0
        for rank, text in _drawn(files):
            smallest.add(rank, len(text.encode()), -number)
            number += 1
        return cls(files, frozenset(-item for _, item in smallest.items()), number)

    def texts(self) -> Iterator[str]:
        """Yield the texts part by part."""
        return (text for number, (_, text) in enumerate(_drawn(self.files)) if number in self.numbers)

    def lines(self) -> Iterator[str]:
        """Yield the paragraphs that are not blank."""
        return (line for text in self.texts() for line in text.split("\n") if line.strip())


def _drawn(files: Sequence[Path]) -> Iterator[tuple[int, str]]:
    for path in files:
        with open_stream(path) as stream:
            yield from map(json.loads, stream)
