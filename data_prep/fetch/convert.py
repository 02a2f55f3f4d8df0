"""Files and shards as documents: the part of ``smlp data fetch`` that runs in parallel on what is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.fetch import hub, warc, wikipedia
from data_prep.fetch.download import DownloadFailed, Patience, RemoteFile, download, from_json
from data_prep.fetch.pieces import Writer
from data_prep.fetch.source import Hub
from data_prep.flow.documents import Defect, Loss, Reading, Record, read
from data_prep.flow.manifest import PartResult
from data_prep.flow.parts import Part
from data_prep.flow.streams import COMPRESSIONS, sha256_of, suffix_of
from data_prep.flow.workers import PartFailed

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
