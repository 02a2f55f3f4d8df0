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
from data_prep.fetch.download import DownloadFailed, RemoteFile, download, from_json
from data_prep.fetch.source import Hub
from data_prep.fetch.wanted import Wanted
from data_prep.flow.documents import Defect, Loss, Record, read
from data_prep.flow.manifest import Counts, PartResult, output_paths
from data_prep.flow.options import COMPRESSIONS
from data_prep.flow.parts import Part
from data_prep.flow.running import STATE
from data_prep.flow.streams import COMPRESSIONS as COMPRESSED
from data_prep.flow.streams import read_json, sha256_of, suffix_of, write_bytes, write_stream
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
            self._outputs.append(written.row(self._out, documents=documents))
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
        row = read_json(self._record)
        if row is None:
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


def part_name(name: str) -> str:
    """A file's name without what says its format: of what is written for it."""
    return _FORMATS.sub("", _FORMATS.sub("", name)).replace(".", "-") or "documents"


def convert(part: Part, out: Path, wanted: Wanted) -> PartResult:
    """Writes the documents of a part into ``NAME-00000.jsonl.gz`` and so on.

    Raises:
        PartFailed: its file is not there and cannot be had.
    """
    reading, facts = wanted.reading, {}
    request = json.loads(part.path.read_text(encoding="utf-8")) if isinstance(part, Requested) else {}
    if "url" in request:
        file = from_json(request)
        path, limits = wanted.raw / file.name, (reading.max_bytes, reading.max_seconds)
        _download_if_absent(file, path, wanted)
        facts = {"url": file.url, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        if wanted.source.format == "wikipedia":
            pieces = wikipedia.articles(path, part.source, *limits)
        elif wanted.source.format == "warc":
            pieces = warc.pages(path, part.source, *limits)
        else:
            pieces = read(Part(path, path.name, part.source), reading)
    elif request:
        name = Part(Path(part.name), part.name, part.source)
        pieces = hub.rows(Hub(**request["hub"]), request["shard"], request["num_shards"], name, reading)
    else:
        pieces = read(part, reading)
    key = f"{part.path} {part.start} {part.stop} {part.path.stat().st_mtime_ns} {facts} {reading}"
    suffix = COMPRESSIONS[wanted.compression]
    writer = Writer(out, part.name, key, suffix, wanted.file_bytes, wanted.limit_documents)
    result = writer.write(iter(pieces))
    if facts and wanted.delete_downloads:
        path.unlink()
    return replace(result, facts=facts)


def _download_if_absent(file: RemoteFile, path: Path, wanted: Wanted) -> None:
    if path.is_file():
        return
    if not wanted.delete_downloads:
        raise PartFailed(f"{file.url}: is not downloaded")
    try:
        download(file, path, wanted.patience)
    except DownloadFailed as error:
        raise PartFailed(str(error)) from None


def named_by_format(file_name: str, form: str) -> str:
    """The name under which a file of documents is stored: its suffix must say what it is."""
    if form not in ("jsonl", "txt", "parquet") or suffix_of(Path(file_name)) == f".{form}":
        return file_name
    path = Path(file_name)
    return f"{path.stem}.{form}{path.suffix}" if path.suffix in COMPRESSED else f"{file_name}.{form}"
