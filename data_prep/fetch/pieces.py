"""The files that a part's documents are written to; those that are finished are kept when a long part is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.flow.documents import Defect, Loss, Record
from data_prep.flow.manifest import Counts, PartResult, output_paths
from data_prep.flow.running import STATE
from data_prep.flow.streams import write_bytes, write_stream


class Writer:
    """Writes documents into ``NAME-00000.jsonl.gz``, ``NAME-00001.jsonl.gz`` and so on.

    After each file, what was read until then is on record; a repeated command reads these documents, but neither writes
    nor counts them again.
    """

    def __init__(self, out: Path, name: str, key: str, suffix: str, file_bytes: int, limit: int | None) -> None:
        """
        Args:
            out: the folder.
            name: of the part.
            key: of what is read and how: with another one, nothing on record is used.
            suffix: of the compression.
            file_bytes: of documents in a file; then the next is begun.
            limit: documents to keep, or None for all.
        """
        self._out, self._name, self._key = out, name, key
        self._suffix, self._file_bytes, self._limit = suffix, file_bytes, limit
        self._record = out / STATE / "pieces" / f"{name}.json"
        self._counts, self._defects, self._outputs, self._read = Counts(), [], [], 0
        self._resume()

    def write(self, pieces: Iterator[Record | Loss | Defect]) -> PartResult:
        """Writes what is not written yet; the result is that of all of it."""
        for _ in islice(pieces, self._read):
            pass
        lines = self._lines(pieces)
        for line in lines:
            path = self._out / f"{self._name}-{len(self._outputs):05d}.jsonl{self._suffix}"
            documents, size = 1, len(line)
            with write_stream(path) as (stream, written):
                stream.write(line)
                while size < self._file_bytes and (line := next(lines, None)) is not None:
                    stream.write(line)
                    documents, size = documents + 1, size + len(line)
            row = {"name": path.name, "bytes": written.num_bytes, "sha256": written.sha256, "documents": documents}
            self._outputs.append(row)
            self._note()
        self._record.unlink(missing_ok=True)
        return PartResult(self._outputs, self._counts, self._defects)

    def _lines(self, pieces: Iterator[Record | Loss | Defect]) -> Iterator[bytes]:
        counts = self._counts
        for piece in pieces:
            if isinstance(piece, Record) and self._limit is not None and counts.kept == self._limit:
                counts.other["parts cut short by --limit-documents"] += 1
                return
            self._read += 1
            if isinstance(piece, Defect):
                self._defects.append({"problem": piece.problem, "where": piece.where})
            elif isinstance(piece, Loss):
                counts.drop(piece.reason, piece.number)
            else:
                counts.keep()
                counts.other["bytes of text"] += len(piece.text.encode("utf-8", "surrogatepass"))
                yield piece.line()

    def _note(self) -> None:
        row: dict[str, Any] = {"key": self._key, "read": self._read, "counts": self._counts.to_json()}
        row |= {"outputs": self._outputs, "defects": self._defects}
        write_bytes(self._record, json.dumps(row).encode())

    def _resume(self) -> None:
        try:
            row = json.loads(self._record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        found = output_paths(self._out, row["outputs"], self._record)
        paths = [(path, output["bytes"]) for path, output in zip(found, row["outputs"], strict=True)]
        if row["key"] == self._key and all(path.is_file() and path.stat().st_size == size for path, size in paths):
            self._counts, self._read = Counts.from_json(row["counts"]), row["read"]
            self._outputs, self._defects = row["outputs"], row["defects"]
