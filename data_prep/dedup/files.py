"""What the phases leave for each other, in ``OUT/.work``; the reports; and where a document's number leads."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.flow.streams import sha256_of

WORK = ".work"
# The point keeps the next step from reading them as documents, whatever files of the corpus are called.
REMOVED = ".reports/removed.jsonl.gz"
CONTAMINATED = ".reports/contaminated.jsonl.gz"
_OPEN_FILES = 64


def output_of(out: Path, path: Path) -> dict[str, Any]:
    """A row of a file that was written, for :class:`data_prep.flow.manifest.PartResult`."""
    return {"name": str(path.relative_to(out)), "bytes": path.stat().st_size, "sha256": sha256_of(path)}


@dataclass(frozen=True)
class Signed:
    """The parts that the first phase has signed: documents are numbered through them, from 0.

    Attributes:
        out: the step's folder.
        names: of the parts; those held out come first, then the inputs in their order.
        bases: number of the first document of each part, and of all documents: int64, shape (parts + 1,).
        num_held_out: parts held out.
    """

    out: Path
    names: tuple[str, ...]
    bases: np.ndarray
    num_held_out: int

    @classmethod
    def of(cls, out: Path, names: Sequence[str], sizes: Sequence[int], num_held_out: int) -> Signed:
        return cls(out, tuple(names), np.concatenate(([0], np.cumsum(sizes))).astype(np.int64), num_held_out)

    @property
    def num_documents(self) -> int:
        return int(self.bases[-1])

    @property
    def first_input(self) -> int:
        """Number of the first document that is not held out."""
        return int(self.bases[self.num_held_out])

    def path(self, part: int, kind: str) -> Path:
        """A file of a part: ``exact``, ``bands``, ``signatures``, ``names``, ``offsets``, ``tainted``."""
        return self.out / WORK / f"{self.names[part]}.{kind}"

    def place(self, document: int) -> tuple[int, int]:
        """Part of a document, and its number in it."""
        part = int(np.searchsorted(self.bases, document, side="right")) - 1
        return part, document - int(self.bases[part])


class Lookup:
    """Signatures and names of single documents, read where they stand in the files; a few files stay open."""

    def __init__(self, signed: Signed, num_perm: int) -> None:
        self._signed, self._num_perm = signed, num_perm
        self._files: OrderedDict[Path, int] = OrderedDict()

    def signature(self, document: int) -> np.ndarray:
        """uint32, shape (num_perm,)."""
        part, index = self._signed.place(document)
        size = 4 * self._num_perm
        return np.frombuffer(self._read(self._signed.path(part, "signatures"), index * size, size), dtype=np.uint32)

    def signatures(self, documents: Sequence[int]) -> np.ndarray:
        """uint32, shape (documents, num_perm)."""
        return np.stack([self.signature(int(document)) for document in documents])

    def name(self, document: int) -> tuple[str, str]:
        """Id and source."""
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
        content = os.pread(self._files[path], size, start)
        assert len(content) == size, f"{path} is shorter than it was written"
        return content

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
