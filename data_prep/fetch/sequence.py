"""Fetch a source: check packages and disk, list its files, download and convert them, write the manifest."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.fetch.convert import REQUEST, Conversion, Requested, convert, named_by_format, part_name
from data_prep.fetch.download import Patience, RemoteFile, download_all, to_json
from data_prep.fetch.hub import pinned
from data_prep.fetch.listing import KEPT, kept_files, list_files
from data_prep.fetch.source import Hub, Source
from data_prep.flow.documents import FORMATS, Reading
from data_prep.flow.manifest import PartResult, write_manifest
from data_prep.flow.options import COMPRESSIONS
from data_prep.flow.parts import PART_BYTES, Part, find_files, plan_parts, unique_name
from data_prep.flow.running import Finished, Run, begin, is_done, run_parts
from data_prep.flow.streams import suffix_of, write_bytes
from smlp.errors import UserError
from smlp.files import plain_name

# Documents as .jsonl.gz, per byte of their text: measured on English news and articles, rounded up.
COMPRESSED_SHARE = 0.45
_PACKAGES = {"wikipedia": ("mwparserfromhell",), "warc": ("warcio", "trafilatura"), "parquet": ("pyarrow",)}


def missing_packages(source: Source, files: Sequence[Path], compression: str) -> list[str]:
    """Names of packages that this source needs and that are not installed."""
    needed = list(_PACKAGES.get(source.format, ()))
    needed += ["requests"] if source.from_web else []
    needed += ["datasets", "huggingface_hub"] if source.hub else []
    needed += ["pyarrow"] if any(suffix_of(path) == ".parquet" for path in files) else []
    names = [*files, *(Path(file.url) for file in source.files)]
    needed += ["zstandard"] if compression == "zst" or any(path.suffix == ".zst" for path in names) else []
    return sorted({name for name in needed if importlib.util.find_spec(name) is None})


def not_writable(folder: Path) -> str:
    """Why nothing can be written to a folder that may not be there yet; "" if it can."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{folder} cannot be made: {place} is no folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to"


def free_bytes(folder: Path) -> int:
    """Of the disk that a folder is on, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def download_bytes(source: Source, files: Sequence[RemoteFile] | None, limit_files: int | None) -> int | None:
    """Bytes to download: from the list of files where it says so, else from the source's own size; None if unknown."""
    if files is not None and all(file.num_bytes is not None for file in files):
        return sum(file.num_bytes for file in files)
    if source.size.bytes is None:
        return None
    return round(source.size.bytes * share_of_files(source, files, limit_files))


def document_bytes(source: Source, files: Sequence[RemoteFile] | None, limit_files: int | None) -> int | None:
    """Bytes that the documents take on disk, roughly; None if unknown."""
    if source.size.text_bytes is None:
        return None
    return round(source.size.text_bytes * COMPRESSED_SHARE * share_of_files(source, files, limit_files))


def share_of_files(source: Source, files: Sequence[RemoteFile] | None, limit_files: int | None) -> float:
    """What part of the source's files is wanted, as far as their number is known."""
    total = source.size.files or (len(files) if files is not None else None)
    wanted = len(files) if files is not None else limit_files
    return 1.0 if total is None or wanted is None else min(1.0, wanted / max(total, 1))


RAW = ".raw"  # of OUT: steps that read OUT leave out what begins with a point
_PHASE = "convert"
_SHARDS = "shards.json"


@dataclass(frozen=True)
class Wanted:
    """A source and how it is to be fetched.

    Attributes:
        source: what.
        out: folder of all sources.
        run: workers and share; its ``out`` is the source's own folder.
        options: values of the source's options.
        reading: how documents are read.
        compression: of what is written, a key of ``COMPRESSIONS``.
        file_bytes: of documents in one file written.
        limit_files: the first files (or shards) only.
        limit_documents: the first documents of each file only.
        connections: files downloaded at a time.
        patience: with servers.
        delete_downloads: each file is downloaded, converted and deleted by one worker.
        check_space: refuse to begin where the disk is too small.
        restart: throw away what other settings left, and read the list of files anew.
    """

    source: Source
    out: Path
    run: Run
    options: dict[str, str]
    reading: Reading
    compression: str = "gz"
    file_bytes: int = 256 << 20
    limit_files: int | None = None
    limit_documents: int | None = None
    connections: int = 3
    patience: Patience = field(default_factory=Patience)
    delete_downloads: bool = False
    check_space: bool = True
    restart: bool = False

    @property
    def raw(self) -> Path:
        """Where its downloads are."""
        return self.out / RAW / self.source.name

    @property
    def settings(self) -> dict[str, Any]:
        """What its documents depend on."""
        return {
            "source": self.source.name,
            "source_sha256": hashlib.sha256(self.source.definition.encode()).hexdigest(),
            "options": self.options,
            "text_field": self.reading.text_field,
            "documents": self.reading.documents_of_text,
            "max_document_bytes": self.reading.max_bytes,
            "max_document_seconds": self.reading.max_seconds,
            "limit_files": self.limit_files,
            "limit_documents": self.limit_documents,
            "compress": self.compression,
            "file_bytes": self.file_bytes,
        }


@dataclass(frozen=True)
class Outcome:
    """What became of a source: its manifest, or sentences about what failed; neither while other shares are at work."""

    finished: Finished
    manifest: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)


def fetch(wanted: Wanted) -> Outcome:
    """Downloads and converts what is not done yet.

    Raises:
        UserError: it cannot begin: no room, no list of files, other work in its folder.
    """
    source = wanted.source
    begin(wanted.run, "fetch", wanted.settings, wanted.restart)
    if wanted.restart:
        for name in (KEPT, _SHARDS):
            (wanted.raw / name).unlink(missing_ok=True)
    files: list[RemoteFile] = []
    if source.from_web:
        files = list_files(source, wanted.options, wanted.raw, wanted.patience)[: wanted.limit_files]
        files = [replace(file, name=named_by_format(file.name, source.format)) for file in files]
        parts = _requested(wanted, [(file.name, to_json(file), file.num_bytes) for file in files])
    elif source.hub:
        parts = _requested(wanted, [(name, row, None) for name, row in _shards(wanted)][: wanted.limit_files])
    else:
        parts = _local(wanted)
    problems: list[str] = []
    if files:
        index, number = wanted.run.share
        mine = list(zip(files, parts, strict=True))[index::number]
        absent = [file for file, part in mine if not is_done(wanted.run, _PHASE, part)]
        check_space(wanted, absent)
        if not wanted.delete_downloads:
            problems = download_all(absent, wanted.raw, wanted.connections, wanted.patience, wanted.run.quiet)
        sizes = [_there(wanted.raw / file.name) or part.size for file, part in zip(files, parts, strict=True)]
        parts = [replace(part, size=size) for part, size in zip(parts, sizes, strict=True)]
    finished = run_parts(wanted.run, _PHASE, parts, partial(convert, conversion=_conversion(wanted)))
    if finished.results is None:
        return Outcome(finished, problems=problems or finished.failed)
    return Outcome(finished, _finish(wanted, finished.results, finished.inputs))


def _conversion(wanted: Wanted) -> Conversion:
    return Conversion(
        wanted.source.name,
        wanted.source.format,
        wanted.reading,
        COMPRESSIONS[wanted.compression],
        wanted.file_bytes,
        wanted.limit_documents,
        wanted.raw,
        wanted.patience if wanted.delete_downloads else None,
    )


def _local(wanted: Wanted) -> list[Part]:
    cut = wanted.reading.documents_of_text != "file"
    found = find_files(wanted.source.paths, FORMATS)
    parts = plan_parts(found, min(PART_BYTES, wanted.file_bytes), cut_text=cut)
    return [replace(part, source=wanted.source.name) for part in parts[: wanted.limit_files]]


def _shards(wanted: Wanted) -> list[tuple[str, dict[str, Any]]]:
    """Name and request of each shard, of the revision that the first command found."""
    kept = wanted.raw / _SHARDS
    key = {"hub": asdict(wanted.source.hub)}
    try:
        row = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        row = {}
    if row.get("key") != key:
        hub, number = pinned(wanted.source.hub)
        row = {"key": key, "hub": asdict(hub), "num_shards": number}
        write_bytes(kept, json.dumps(row, indent=1).encode())
    hub, number = Hub(**row["hub"]), row["num_shards"]
    return [
        (f"{hub.split}-{shard:05d}-of-{number:05d}", {"hub": row["hub"], "shard": shard, "num_shards": number})
        for shard in range(number)
    ]


def _requested(wanted: Wanted, requests: Sequence[tuple[str, dict[str, Any], int | None]]) -> list[Requested]:
    """Parts for files of the web or shards. A request that is not what it was makes its download void."""
    names: set[str] = set()
    parts = []
    for name, row, size in requests:
        plain_name(name, f"the list of {wanted.source.name}")
        path, content = wanted.raw / f"{name}{REQUEST}", json.dumps(row).encode()
        if not path.is_file() or path.read_bytes() != content:
            (wanted.raw / name).unlink(missing_ok=True)
            write_bytes(path, content)
        stem = unique_name(part_name(name), names)
        parts.append(Requested(path, stem, wanted.source.name, size=size or 1))
    return parts


def check_space(wanted: Wanted, absent: Sequence[RemoteFile]) -> None:
    """Raises UserError if the disk has less room than what is still to come, as far as that is known."""
    need = needed_bytes(wanted, absent)
    free = free_bytes(wanted.out)
    if wanted.check_space and need is not None and need > free:
        raise UserError(
            f"{wanted.source.name} still needs about {need / 1e9:,.1f} GB in {wanted.out}, {free / 1e9:,.1f} are free: "
            "--delete-downloads or --limit-files need less, --no-space-check goes on all the same"
        )


def needed_bytes(wanted: Wanted, absent: Sequence[RemoteFile] | None) -> int | None:
    """Room for downloads and documents of the files that are still to come (None: of all); None if unknown.

    Shards of the Hub are converted as they come, and take none for themselves.
    """
    download = download_bytes(wanted.source, absent, wanted.limit_files) if wanted.source.from_web else 0
    if download is not None and wanted.delete_downloads:
        largest = max((file.num_bytes or 0 for file in absent or ()), default=0)
        per_file = largest or download // max(len(absent or ()) or wanted.source.size.files or 1, 1)
        download = min(download, wanted.run.workers * per_file)
    there = sum(_there(wanted.raw / file.name) for file in absent or ())
    documents = document_bytes(wanted.source, absent, wanted.limit_files)
    known = [max(0, download - there)] if download is not None else []
    known += [documents] if documents is not None else []
    return sum(known) if known else None


def _there(path: Path) -> int:
    places = (path, path.with_name(path.name + ".partial"))
    return sum(place.stat().st_size for place in places if place.is_file())


def known_files(wanted: Wanted) -> list[RemoteFile] | None:
    """The files that an earlier command found, or that the source itself names; None if only the server knows."""
    if wanted.source.files:
        return list(wanted.source.files)[: wanted.limit_files]
    kept = kept_files(wanted.source, wanted.options, wanted.raw) if wanted.source.from_web else None
    return None if kept is None else kept[: wanted.limit_files]


def _finish(wanted: Wanted, results: list[PartResult], inputs: list[dict[str, Any]]) -> dict[str, Any]:
    if wanted.source.from_web:
        inputs = [{"path": result.facts["url"], **_only(result.facts, "bytes", "sha256")} for result in results]
    source = wanted.source
    facts = {"title": source.title, "licence": source.licence, "citation": source.citation, "notes": source.notes}
    manifest = write_manifest(wanted.run.out, "fetch", wanted.settings, inputs, results, {"corpus": facts})
    written = {output["name"] for output in manifest["outputs"]}
    for path in wanted.run.out.glob("*.jsonl*"):
        if path.name not in written:  # of a file that is no longer there
            path.unlink()
    return manifest


def _only(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}
