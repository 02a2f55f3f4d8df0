"""Fetch a source: list its files, download and convert them, write the manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from data_prep.fetch.convert import REQUEST, Requested, convert, named_by_format, part_name
from data_prep.fetch.download import RemoteFile, bytes_there, download_all, to_json
from data_prep.fetch.hub import pinned
from data_prep.fetch.listing import KEPT, list_files
from data_prep.fetch.source import Hub
from data_prep.fetch.wanted import Wanted
from data_prep.flow.documents import FORMATS
from data_prep.flow.manifest import write_manifest
from data_prep.flow.parts import PART_BYTES, find_files, plan_parts, unique_name
from data_prep.flow.running import Finished, begin, is_done, run_parts
from data_prep.flow.streams import read_json, write_bytes
from smlp.files import plain_name

_PHASE = "convert"
_SHARDS = "shards.json"


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
    source, run = wanted.source, wanted.run
    begin(run, "fetch", wanted.settings, wanted.restart)
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
        cut_text = wanted.reading.documents_of_text != "file"
        parts = plan_parts(find_files(source.paths, FORMATS), min(PART_BYTES, wanted.file_bytes), cut_text=cut_text)
        parts = [replace(part, source=source.name) for part in parts[: wanted.limit_files]]
    problems: list[str] = []
    if files:
        index, number = run.share
        mine = list(zip(files, parts, strict=True))[index::number]
        absent = [file for file, part in mine if not is_done(run, _PHASE, part)]
        wanted.refuse_small_disk(absent)
        if not wanted.delete_downloads:
            problems = download_all(absent, wanted.raw, wanted.connections, wanted.patience, run.quiet)
        sizes = [bytes_there(wanted.raw / file.name) or part.size for file, part in zip(files, parts, strict=True)]
        parts = [replace(part, size=size) for part, size in zip(parts, sizes, strict=True)]
    finished = run_parts(run, _PHASE, parts, partial(convert, wanted=wanted))
    if finished.results is None:
        return Outcome(finished, problems=problems or finished.failed)
    inputs = finished.inputs
    if source.from_web:
        facts = [result.facts for result in finished.results]
        inputs = [{"path": row["url"], "bytes": row["bytes"], "sha256": row["sha256"]} for row in facts]
    corpus = {"title": source.title, "licence": source.licence, "citation": source.citation, "notes": source.notes}
    manifest = write_manifest(run.out, "fetch", wanted.settings, inputs, finished.results, {"corpus": corpus})
    written = {output["name"] for output in manifest["outputs"]}
    for path in run.out.glob("*.jsonl*"):
        if path.name not in written:  # of a file that is no longer there
            path.unlink()
    return Outcome(finished, manifest)


def _shards(wanted: Wanted) -> list[tuple[str, dict[str, Any]]]:
    """Name and request of each shard, of the revision that the first command found."""
    kept = wanted.raw / _SHARDS
    key = {"hub": asdict(wanted.source.hub)}
    row = read_json(kept)
    if row is None or row["key"] != key:
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
