"""Turn downloaded files and shards of the Hub into files of documents, a part at a time.

A long part is written in several files; those that are finished are kept when it is killed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.fetch import hub, warc, wikipedia
from data_prep.fetch.download import DownloadFailed, Patience, RemoteFile, download, from_json
from data_prep.fetch.source import Hub
from data_prep.flow.documents import Defect, Loss, Reading, Record, read
from data_prep.flow.manifest import Counts, PartResult, output_paths
from data_prep.flow.parts import Part
from data_prep.flow.running import STATE
from data_prep.flow.streams import COMPRESSIONS, sha256_of, suffix_of, write_bytes, write_stream
from data_prep.flow.workers import PartFailed


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


REQUEST = ".request.json"
_FORMATS = re.compile(r"\.(xml|warc|jsonl|json|txt|parquet)(?=[-.]|$)|\.(gz|bz2|xz|zst)$")


@dataclass(frozen=True)
class Requested(Part):
    """A part that is a file of the web or a shard of the Hub; its ``path`` is the request for it, a small file.

    ``size`` is for progress: bytes of what is asked for, 1 if nobody knows.
    """

    size: int = 1

    @property
    def num_bytes(self) -> int:
        return self.size


@dataclass(frozen=True)
class Conversion:
    """How parts become documents.

    Attributes:
        source: what documents say they come from.
        format: of the web's files.
        reading: column, documents of text, longest document.
        suffix: of the compression of what is written.
        file_bytes: of documents in a file that is written, before compression; then the next is begun.
        limit: documents to keep of each part, or None.
        raw: folder of downloads, for parts of the web.
        patience: with the server where a part's file is downloaded only now, converted and deleted; or None.
    """

    source: str
    format: str
    reading: Reading
    suffix: str = ".gz"
    file_bytes: int = 256 << 20
    limit: int | None = None
    raw: Path | None = None
    patience: Patience | None = None


def part_name(name: str) -> str:
    """A file's name without what says its format: of what is written for it."""
    return _FORMATS.sub("", _FORMATS.sub("", name)).replace(".", "-") or "documents"


def convert(part: Part, out: Path, conversion: Conversion) -> PartResult:
    """Writes the documents of a part into ``NAME-00000.jsonl.gz`` and so on.

    Raises:
        PartFailed: its file is not there and cannot be had.
    """
    facts: dict[str, Any] = {}
    request = json.loads(part.path.read_text(encoding="utf-8")) if isinstance(part, Requested) else {}
    if "url" in request:
        path, facts = _raw_file(from_json(request), conversion)
        pieces = _of_file(path, conversion)
    elif request:
        wanted, name = Hub(**request["hub"]), Part(Path(part.name), part.name, part.source)
        pieces = hub.rows(wanted, request["shard"], request["num_shards"], name, conversion.reading)
    else:
        pieces = read(part, conversion.reading)
    key = f"{part.path} {part.start} {part.stop} {part.path.stat().st_mtime_ns} {facts} {conversion.reading}"
    writer = Writer(out, part.name, key, conversion.suffix, conversion.file_bytes, conversion.limit)
    result = writer.write(iter(pieces))
    if "url" in request and conversion.patience:
        path.unlink()
    return replace(result, facts=facts)


def _raw_file(file: RemoteFile, conversion: Conversion) -> tuple[Path, dict[str, Any]]:
    path = conversion.raw / file.name
    if not path.is_file():
        if conversion.patience is None:
            raise PartFailed(f"{file.url}: is not downloaded")
        try:
            download(file, path, conversion.patience)
        except DownloadFailed as error:
            raise PartFailed(str(error)) from None
    return path, {"url": file.url, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _of_file(path: Path, conversion: Conversion) -> Iterator[Record | Loss | Defect]:
    limits = conversion.reading.max_bytes, conversion.reading.max_seconds
    if conversion.format == "wikipedia":
        return wikipedia.articles(path, conversion.source, *limits)
    if conversion.format == "warc":
        return warc.pages(path, conversion.source, *limits)
    return read(Part(path, path.name, conversion.source), conversion.reading)


def named_by_format(file_name: str, form: str) -> str:
    """The name under which a file of documents is stored: its suffix must say what it is."""
    if form not in ("jsonl", "txt", "parquet") or suffix_of(Path(file_name)) == f".{form}":
        return file_name
    path = Path(file_name)
    return f"{path.stem}.{form}{path.suffix}" if path.suffix in COMPRESSIONS else f"{file_name}.{form}"
