"""Second and third phase, a partition at a time: find equal and similar documents, and choose which one is kept."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from data_prep.dedup.files import Lookup, Signed, read_partition
from data_prep.dedup.signatures import Scheme, similarity
from data_prep.flow.manifest import WORK, Counts, PartResult
from data_prep.flow.parts import FilePart
from data_prep.flow.streams import write_stream

_PAIRS_AT_ONCE = 1 << 20
# In larger groups, a document that is similar to the first one not yet joined is not compared with the others.
ALL_PAIRS = 256
GROUP = 1 << 16  # larger groups are processed in pieces, each with the first document of the group


def first_of_each(num_documents: int, files: Sequence[Path]) -> np.ndarray:
    """Return for each document the first one that a chain of pairs joins it with; itself if there is none.

    This is a union-find on many pairs at once: every document points to an earlier one or to itself; pairs make one
    root point to the other, until all pairs have one root.

    Args:
        num_documents: they are numbered from 0.
        files: of pairs, int64, read again and again, a piece at a time.

    Returns:
        uint32 (int64 above 4 billion documents), shape (num_documents,): memory is three times this.
    """
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


def partition_parts(out: Path, num_partitions: int) -> list[FilePart]:
    """Return a part for each partition; its file only says which."""
    parts = []
    for number in range(num_partitions):
        path = out / WORK / "partitions" / f"{number:05d}"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another share may write it too: both must write the same file, including its time.
            temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
            temporary.write_text(f"{number}\n")
            os.utime(temporary, (0, 0))
            os.replace(temporary, path)
        parts.append(FilePart(path, f"{number:05d}", ""))
    return parts


def _rows(signed: Signed, kind: str, width: int, num_partitions: int, partition: int) -> np.ndarray:
    """Return the rows of a partition from all parts, with the documents' numbers counted over all parts."""
    pieces = []
    for part, base in enumerate(signed.bases[:-1]):
        rows = read_partition(signed.path(part, kind), width, num_partitions, partition)
        rows[:, -1] += np.uint64(base)
        pieces.append(rows)
    return np.concatenate(pieces)


def exact_pairs(part: FilePart, out: Path, signed: Signed, num_partitions: int) -> PartResult:
    """Write ``.work/exact-NAME.pairs``: (first, later) documents of the same words."""
    rows = _rows(signed, "exact", 3, num_partitions, int(part.name))
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    first = rows[np.flatnonzero(new)[np.cumsum(new) - 1], 2] if len(rows) else rows[:, 2]
    pairs = np.stack([first, rows[:, 2]], axis=1)[~new].astype(np.int64)
    return _write_pairs(out / pairs_name("exact", part), out, pairs)


def near_pairs(
    part: FilePart, out: Path, signed: Signed, num_partitions: int, scheme: Scheme, threshold: float, unique: Path
) -> PartResult:
    """Write ``.work/near-NAME.pairs``: pairs of documents that share a band of the partition.

    By their signatures, their similarity is at least ``threshold``. ``unique`` has one byte per document: 0 for
    documents that are left out.
    """
    rows = _rows(signed, "bands", 2, num_partitions, int(part.name))
    rows = rows[np.memmap(unique, dtype=bool, mode="r")[rows[:, 1].astype(np.int64)]] if len(rows) else rows
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    edges = np.flatnonzero(np.concatenate(([True], rows[1:, 0] != rows[:-1, 0], [True]))) if len(rows) else np.zeros(1)
    groups = np.flatnonzero(np.diff(edges) > 1)
    found: set[tuple[int, int]] = set()
    looked_at: set[bytes] = set()  # groups seen: similar documents share many bands
    lookup = Lookup(signed, scheme.num_perm)
    for group in groups:
        documents = rows[int(edges[group]) : int(edges[group + 1]), 1].astype(np.int64)
        if len(documents) <= ALL_PAIRS:
            key = documents.tobytes()
            if key in looked_at:
                continue
            looked_at.add(key)
        for start in range(1, len(documents), GROUP):
            piece = np.concatenate((documents[:1], documents[start : start + GROUP]))
            found.update(alike(piece, lookup, threshold))
    lookup.close()
    pairs = np.array(sorted(found), dtype=np.int64).reshape(-1, 2)
    return _write_pairs(out / pairs_name("near", part), out, pairs)


def alike(documents: np.ndarray, lookup: Lookup, threshold: float) -> Iterator[tuple[int, int]]:
    """Yield pairs of documents with similar signatures, enough of them to join every group of similar documents.

    Among more than ``ALL_PAIRS`` documents, one that is similar to an earlier one is not compared with later ones.
    """
    values = lookup.signatures(documents)
    if len(documents) > ALL_PAIRS:
        while len(documents) > 1:
            close = similarity(values[0], values[1:]) >= threshold
            yield from ((int(documents[0]), int(later)) for later in documents[1:][close])
            documents, values = documents[1:][~close], values[1:][~close]
        return
    joined = np.arange(len(documents))
    for place in range(len(documents) - 1):
        close = similarity(values[place], values[place + 1 :]) >= threshold
        for later in place + 1 + np.flatnonzero(close):
            if joined[later] != joined[place]:
                joined[joined == joined[later]] = joined[place]
                yield int(documents[place]), int(documents[later])


def pairs_name(kind: str, part: FilePart) -> str:
    """Return the file of a partition's pairs, relative to the step's folder; ``kind`` is ``exact`` or ``near``."""
    return f"{WORK}/{kind}-{part.name}.pairs"


def _write_pairs(path: Path, out: Path, pairs: np.ndarray) -> PartResult:
    with write_stream(path) as (stream, written):
        stream.write(pairs.tobytes())
    return PartResult([written.row(out)], Counts(), facts={"pairs": len(pairs)})
