"""The intermediate files of the phases in ``OUT/.work``, and the reports.

Rows of numbers are partitioned by their first number, so that one partition at a time fits in memory. A file holds
blocks, each ordered by partition; its index says where in each block each partition begins.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.flow.manifest import REPORTS, WORK
from data_prep.flow.streams import sha256_of, write_bytes, write_stream

# The leading dot keeps the next step from reading them as documents.
REMOVED = f"{REPORTS}/removed.jsonl.gz"
CONTAMINATED = f"{REPORTS}/contaminated.jsonl.gz"
_OPEN_FILES = 64


@contextmanager
def spilling(path: Path, num_partitions: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Give a function that writes a block of rows, uint64, shape (rows, width), to ``path`` and ``path.index``."""
    edges = [np.zeros(1, dtype=np.int64)]  # of the partitions in each block, counted in rows of the file
    with write_stream(path) as (stream, _):

        def add(rows: np.ndarray) -> None:
            partitions = rows[:, 0] % np.uint64(num_partitions)
            sizes = np.bincount(partitions.astype(np.int64), minlength=num_partitions)
            edges.append(edges[-1][-1] + np.concatenate(([0], np.cumsum(sizes))))
            stream.write(rows[np.argsort(partitions, kind="stable")].tobytes())

        yield add
    write_bytes(path.with_name(path.name + ".index"), b"".join(block.tobytes() for block in edges[1:]))


def read_partition(path: Path, width: int, num_partitions: int, partition: int) -> np.ndarray:
    """Return all rows of a partition in the order they were added: uint64, shape (rows, width)."""
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


def output_of(out: Path, path: Path) -> dict[str, Any]:
    """Return the row of a written file among the outputs of a :class:`data_prep.flow.manifest.PartResult`."""
    return {"name": str(path.relative_to(out)), "bytes": path.stat().st_size, "sha256": sha256_of(path)}


@dataclass(frozen=True)
class Signed:
    """The parts that the first phase has signed. Documents are numbered through them, from 0."""

    out: Path  # the step's folder
    names: list[str]  # of the parts; those held out come first, then the inputs in their order
    bases: np.ndarray  # number of the first document of each part, and of all documents: int64, shape (parts + 1,)
    first_input: int  # number of the first document that is not held out

    @property
    def num_documents(self) -> int:
        return int(self.bases[-1])

    def path(self, part: int, kind: str) -> Path:
        """Return a file of a part: ``exact``, ``bands``, ``signatures``, ``names``, ``offsets``, ``tainted``."""
        return self.out / WORK / f"{self.names[part]}.{kind}"

    def place(self, document: int) -> tuple[int, int]:
        """Return the part of a document and its number in that part."""
        part = int(np.searchsorted(self.bases, document, side="right")) - 1
        return part, document - int(self.bases[part])


class Lookup:
    """Read signatures and names of single documents from the files, of which a few stay open."""

    def __init__(self, signed: Signed, num_perm: int) -> None:
        self._signed, self._num_perm = signed, num_perm
        self._files: OrderedDict[Path, int] = OrderedDict()

    def signature(self, document: int) -> np.ndarray:
        """Return the signature of a document: uint32, shape (num_perm,)."""
        part, index = self._signed.place(document)
        size = 4 * self._num_perm
        return np.frombuffer(self._read(self._signed.path(part, "signatures"), index * size, size), dtype=np.uint32)

    def signatures(self, documents: Sequence[int]) -> np.ndarray:
        """Return the signatures of documents: uint32, shape (documents, num_perm)."""
        return np.stack([self.signature(int(document)) for document in documents])

    def name(self, document: int) -> tuple[str, str]:
        """Return id and source of a document."""
        part, index = self._signed.place(document)
        start, stop = np.frombuffer(self._read(self._signed.path(part, "offsets"), 8 * index, 16), dtype=np.int64)
        identity, source = json.loads(self._read(self._signed.path(part, "names"), int(start), int(stop - start)))
        return identity, source

    def _read(self, path: Path, start: int, size: int) -> bytes:
        if path in self._files:
            self._files.move_to_end(path)
        else:
            self._files[path] = os.open(path, os.O_RDONLY)
            if len(self._files) > _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        try:
            content = os.pread(self._files[path], size, start)
        except OSError as error:
            error.filename = str(path)
            raise
        assert len(content) == size, f"{path} is shorter than when it was written"
        return content

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
