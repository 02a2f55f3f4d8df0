"""Fetch a source: list its files, download them, convert them to documents part by part, write the manifest.

The documents of a part are written in several files; those that are finished are kept when a long part is killed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.fetch import hub, warc, wikipedia
from data_prep.fetch.download import (
    DownloadFailed,
    RemoteFile,
    bytes_there,
    difference,
    download,
    download_all,
    from_json,
)
from data_prep.fetch.listing import list_files
from data_prep.fetch.source import Hub
from data_prep.fetch.wanted import Wanted
from data_prep.flow.documents import FORMATS, Defect, Failure, Loss, Record, check_format, read
from data_prep.flow.manifest import (
    SETTINGS,
    STATE,
    Counts,
    PartResult,
    output_paths,
    read_settings,
    write_manifest,
)
from data_prep.flow.options import COMPRESSIONS
from data_prep.flow.parts import PART_BYTES, FilePart, find_files, plan_parts, report_left_out, unique_name
from data_prep.flow.running import Finished, begin, forget, is_done, locked, run_parts
from data_prep.flow.streams import read_json, sha256_of, write_bytes, write_stream
from data_prep.flow.workers import PartFailed
from smlp import __version__
from smlp.files import plain_name

REQUEST = ".request.json"
_PHASE = "convert"
_PIECES = "pieces"  # in ``.state``: of each part at work, the files that it has written
_SHARDS = "shards.json"
_FORMATS = re.compile(r"\.(xml|warc|jsonl|json|txt|parquet)(?=[-.]|$)|\.(gz|bz2|xz|zst)$")


@dataclass(frozen=True)
class Outcome:
    """The manifest of a source, or sentences about what failed; neither while other shares are at work."""

    finished: Finished
    manifest: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)


def fetch(wanted: Wanted) -> Outcome:
    """Download and convert what is not done yet.

    Raises:
        UserError: it cannot begin: no disk space, no list of files, or other work in its folder.
    """
    source, run = wanted.source, wanted.run
    local = local_files(wanted)
    report_left_out(source.paths, FORMATS)
    parts: Sequence[FilePart] = _local_parts(wanted, local)
    if parts:
        wanted.refuse_small_disk(needed_bytes(wanted, local))  # before the folder is bound to these settings
    begin(run, "fetch", wanted.settings, wanted.restart)
    corpus = {"title": source.title, "licence": source.licence, "citation": source.citation, "notes": source.notes}
    problems: list[str] = []
    if source.from_web or source.hub:
        with locked(run):  # another command would write into the same files
            if source.from_web:
                parts, problems = _downloaded(wanted)
            else:
                shards = _shards(wanted)
                corpus["hub"] = shards[0][1]["hub"] if shards else {}
                wanted.refuse_small_disk(needed_bytes(wanted, []))
                parts = _requested(wanted, shards[: wanted.limit_files])
    finished = run_parts(run, _PHASE, parts, partial(convert, wanted=wanted))
    if finished.results is None:
        return Outcome(finished, problems=problems or finished.failed)
    pieces = run.out / STATE / _PIECES  # left by parts that were interrupted, and whose inputs are gone
    gone = set(pieces.glob("*.json")) - {pieces / f"{part.name}.json" for part in parts}
    forget(run.out, gone, {output["name"] for result in finished.results for output in result.outputs})
    inputs = finished.inputs
    if source.from_web:
        facts = [result.facts for result in finished.results]
        inputs = [{"path": row["url"], "bytes": row["bytes"], "sha256": row["sha256"]} for row in facts]
    manifest = write_manifest(run.out, "fetch", wanted.settings, inputs, finished.results, {"corpus": corpus})
    return Outcome(finished, manifest)


def _local_parts(wanted: Wanted, local: list[tuple[Path, Path]]) -> list[FilePart]:
    cut_text = wanted.reading.documents_of_text != "file"
    most = sys.maxsize if wanted.limit_documents else min(PART_BYTES, wanted.file_bytes)
    parts = plan_parts(local, most, cut_text=cut_text)
    return [replace(part, source=wanted.source.name) for part in parts]


def local_files(wanted: Wanted) -> list[tuple[Path, Path]]:
    """Return the files of a source on disk, as :func:`find_files` does; none of other sources.

    Raises:
        UserError: a place does not exist or holds no documents.
    """
    found = find_files(wanted.source.paths, FORMATS)[: wanted.limit_files]
    for _, path in found:
        check_format(path)
    return found


def has_same_settings(wanted: Wanted) -> bool | None:
    """Return whether the work in the folder of a source has these settings; None if there is none."""
    record = wanted.run.out / STATE / SETTINGS
    settings = {"step": "fetch", "settings": json.loads(json.dumps(wanted.settings))}
    return read_settings(record) == settings if record.is_file() else None


def needed_bytes(wanted: Wanted, local: list[tuple[Path, Path]]) -> int | None:
    """Estimate the disk space that the command still needs; None if it is unknown. No server is asked.

    ``local`` are its files on disk, as :func:`local_files` gives them.
    """
    same = has_same_settings(wanted)  # else nothing is done, or --restart deletes it
    files, shards = wanted.known_files(), _shards(wanted, kept_only=True) if wanted.source.hub else []
    parts: list[tuple[FilePart, bytes | None]] = [(part, None) for part in _local_parts(wanted, local)]
    parts = parts or [*_planned(wanted, _requests(files) if files is not None else shards[: wanted.limit_files])]
    undone = [
        not (same and (content is None or _is_kept(part, content)) and is_done(wanted.run, _PHASE, part))
        for part, content in parts
    ]
    if files is not None:
        index, number = wanted.run.share
        mine = [*zip(files, undone, strict=True)][index::number]
        absent = [file for file, is_absent in mine if is_absent]
        return wanted.sizes(absent)["needed_bytes"]
    need = wanted.sizes(None, len(shards) or None)["needed_bytes"]
    share = sum(undone) / len(parts) if parts else 1.0
    return 0 if not share else need if need is None else round(need * share)


def _downloaded(wanted: Wanted) -> tuple[list[RemotePart], list[str]]:
    """Download what is missing of this share; return the parts of all files, and problems."""
    run, problems = wanted.run, []
    files = list_files(wanted.source, wanted.options, wanted.raw, wanted.patience, wanted.restart)[: wanted.limit_files]
    parts = _requested(wanted, _requests(files))
    index, number = run.share
    mine = list(zip(files, parts, strict=True))[index::number]
    absent = [file for file, part in mine if not is_done(run, _PHASE, part)]
    wanted.refuse_small_disk(needed_bytes(wanted, []))
    if not wanted.delete_downloads:
        problems = download_all(absent, wanted.raw, wanted.connections, wanted.patience, run.quiet)
    sizes = [bytes_there(wanted.raw / file.name) or part.size for file, part in zip(files, parts, strict=True)]
    return [replace(part, size=size) for part, size in zip(parts, sizes, strict=True)], problems


def _requests(files: Sequence[RemoteFile]) -> list[tuple[str, dict[str, Any]]]:
    return [(file.name, asdict(file)) for file in files]


def _shards(wanted: Wanted, kept_only: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Return name and request of each shard, for the revision that the first command found; none if that is unknown.

    Without ``kept_only`` the Hub is asked then, and always with ``--restart``.
    """
    kept = wanted.raw / _SHARDS
    files = {"files": found} if (found := hub.files_of(wanted.source.hub)) else {}
    key = {"hub": asdict(wanted.source.hub), **files}
    row = read_json(kept)
    if row is None or row.get("key") != key or (wanted.restart and not kept_only):
        if kept_only:
            return []
        dataset, number = hub.pinned(wanted.source.hub)
        row = {"key": key, "hub": asdict(dataset), "num_shards": number}
        write_bytes(kept, json.dumps(row, indent=1).encode())
    split, number = row["hub"]["split"], row["num_shards"]
    requests = ({"hub": row["hub"], "shard": shard, "num_shards": number, **files} for shard in range(number))
    return [(f"{split}-{shard:05d}-of-{number:05d}", request) for shard, request in enumerate(requests)]


@dataclass(frozen=True)
class RemotePart(FilePart):
    """A file of the web or a shard of the Hub as a part; its ``path`` is a small file, the request for it.

    ``size`` is for progress: bytes of what is asked for, 1 if they are unknown.
    """

    size: int = 1

    @property
    def num_bytes(self) -> int:
        return self.size


def _requested(wanted: Wanted, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[RemotePart]:
    """Return parts for files of the web or shards. If a request has changed, its download is removed."""
    planned = _planned(wanted, requests)
    for part, content in planned:
        if not _is_kept(part, content):
            part.path.with_name(part.path.name.removesuffix(REQUEST)).unlink(missing_ok=True)
            write_bytes(part.path, content)
    return [part for part, _ in planned]


def _planned(wanted: Wanted, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[RemotePart, bytes]]:
    """Return parts for files of the web or shards, and what their requests hold."""
    names: set[str] = set()
    planned = []
    for name, row in requests:
        plain_name(name, f"the list of {wanted.source.name}")
        path, own = wanted.raw / f"{name}{REQUEST}", unique_name(part_name(name), names)
        part = RemotePart(path, own, wanted.source.name, size=row.get("num_bytes") or 1)
        planned.append((part, json.dumps(row).encode()))
    return planned


def _is_kept(part: RemotePart, content: bytes) -> bool:
    return part.path.is_file() and part.path.read_bytes() == content


def part_name(name: str) -> str:
    """Return a file's name without its format, for the files that are made of it."""
    return _FORMATS.sub("", _FORMATS.sub("", name)).replace(".", "-") or "documents"


def convert(part: FilePart, out: Path, wanted: Wanted) -> PartResult:
    """Write the documents of a part into ``NAME-00000.jsonl.gz`` and so on.

    Raises:
        PartFailed: its file is not there and cannot be downloaded.
    """
    reading, facts = wanted.reading, {}
    request = json.loads(part.path.read_text(encoding="utf-8")) if isinstance(part, RemotePart) else {}
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
            pieces = read(FilePart(path, path.name, part.source), reading)
    elif request:
        name = FilePart(Path(part.name), part.name, part.source)
        pieces = hub.rows(Hub(**request["hub"]), request["shard"], request["num_shards"], name, reading)
    else:
        pieces = read(part, reading)
    key = f"{__version__} {part.path} {part.start} {part.stop} {part.path.stat().st_mtime_ns} {facts} {reading}"
    suffix = COMPRESSIONS[wanted.compression]
    writer = Writer(out, part.name, key, suffix, wanted.file_bytes, wanted.limit_documents)
    result = writer.write(iter(pieces))
    if facts and wanted.delete_downloads:
        path.unlink()
    return replace(result, facts=facts)


def _download_if_absent(file: RemoteFile, path: Path, wanted: Wanted) -> None:
    if path.is_file():
        if problem := difference(file, path):
            raise PartFailed(f"{path} was changed ({problem}): remove it, and the same command downloads it again")
        return
    if not wanted.delete_downloads:
        raise PartFailed(f"{file.url}: is not downloaded")
    try:
        download(file, path, wanted.patience)
    except DownloadFailed as error:
        raise PartFailed(str(error)) from None


class Writer:
    """Write documents into ``NAME-00000.jsonl.gz``, ``NAME-00001.jsonl.gz`` and so on, each of ``file_bytes`` of text.

    After each file, the number of documents read is recorded; a repeated command reads these again, but neither
    writes nor counts them. ``key`` says what is read and how: with another key, the record is not used. ``limit`` is
    the number of documents to keep, or None for all.
    """

    def __init__(self, out: Path, name: str, key: str, suffix: str, file_bytes: int, limit: int | None) -> None:
        self._out, self._name, self._key = out, name, key
        self._suffix, self._file_bytes, self._limit = suffix, file_bytes, limit
        self._record = out / STATE / _PIECES / f"{name}.json"
        self._counts, self._defects, self._outputs, self._read = Counts(), [], [], 0
        self._is_over = False  # what follows the last document is counted as well
        self._resume()

    def write(self, pieces: Iterator[Record | Loss | Defect]) -> PartResult:
        """Write the remaining documents; the result covers all of them."""
        left = 0 if self._is_over else self._read
        while left > 0 and (piece := next(pieces, None)) is not None:
            left -= not isinstance(piece, Defect)
        lines = iter(()) if self._is_over else self._lines(pieces)
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
                break
            self._read += not isinstance(piece, Defect)
            if isinstance(piece, Defect):
                self._defects.append({"problem": piece.problem, "where": piece.where})
            elif isinstance(piece, Loss):
                counts.drop(piece.reason, piece.number)
                if isinstance(piece, Failure):
                    self._defects.append({"problem": f"dropped, {piece.reason}", "where": piece.where})
            else:
                counts.keep()
                counts.other["bytes of text"] += len(piece.text.encode("utf-8", "surrogatepass"))
                yield piece.line()
        self._is_over = True

    def _note(self) -> None:
        row: dict[str, Any] = {"key": self._key, "read": self._read, "over": self._is_over}
        row["counts"] = self._counts.to_json()
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
            self._is_over = row.get("over", False)
            self._outputs, self._defects = row["outputs"], row["defects"]
        else:
            forget(self._out, [self._record], set())
