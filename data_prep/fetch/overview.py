"""What ``smlp data fetch`` prints: tables of sources, all of one source, and a plan."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from data_prep.fetch.source import Source
from smlp.cli.json_file import write_json


def print_list(sources: Sequence[Source], json_file: str | None) -> int:
    """A line for each source: where from, how much, whose terms, whether it can be had."""
    rows = [("name", "from", "download", "text", "licence", "status")]
    for source in sources:
        status = f"gone: use {' or '.join(source.replacement)}" if source.status == "gone" else source.status
        sizes = size(source.size.bytes), size(source.size.text_bytes)
        rows.append(
            (source.name, source.kind, *sizes, textwrap.shorten(source.licence, 50, placeholder=" ..."), status)
        )
    print(_table(rows, right=(2, 3)))
    if json_file:
        write_json(json_file, [as_json(source) for source in sources])
    return 0


def print_one(source: Source, json_file: str | None) -> int:
    """Everything that is known of a source."""
    print(f"{source.name}: {source.title}")
    lines = [
        ("status", source.status + (f", instead: {', '.join(source.replacement)}" if source.replacement else "")),
        ("from", _place(source)),
        ("format", source.format),
        ("options", ", ".join(f"{name}={value}" for name, value in source.options.items())),
        ("download", size(source.size.bytes) + (f" in {source.size.files:,} files" if source.size.files else "")),
        ("text", size(source.size.text_bytes)),
        ("documents", f"{source.size.documents:,}" if source.size.documents else ""),
        ("tokens", f"{source.size.tokens:,}" if source.size.tokens else ""),
        ("sizes from", source.size.basis),
        ("licence", source.licence),
        ("cite", source.citation),
        *(("note", note) for note in source.notes),
    ]
    print("\n".join(f"  {name:<11}{value}" for name, value in lines if value))
    if json_file:
        write_json(json_file, as_json(source))
    return 0


def as_json(source: Source) -> dict[str, Any]:
    """A source without its file's text."""
    row = asdict(source)
    del row["definition"]
    return {**row, "paths": [str(path) for path in source.paths], "kind": source.kind}


def print_plan(rows: list[dict[str, Any]], free: int, problems: list[str], json_file: str | None) -> int:
    """What would be fetched; 1 if something stands against it."""
    lines = [("name", "from", "files", "download", "documents", "disk needed", "options")]
    for row in rows:
        number = "?" if row["files"] is None else f"{row['files']:,}"
        sizes = [size(row[name]) for name in ("download_bytes", "document_bytes", "needed_bytes")]
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        lines.append((row["name"], row["from"], number, *sizes, options))
    print(_table(lines, right=(2, 3, 4, 5)))
    print(f"free disk: {size(free)}; '?' is not known before the server is asked")
    for problem in problems:
        print(f"problem: {problem}")
    if json_file:
        write_json(json_file, {"sources": rows, "free_bytes": free, "problems": problems})
    return 1 if problems else 0


def size(num_bytes: int | None) -> str:
    """Bytes for people; ? where nobody knows."""
    if num_bytes is None:
        return "?"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes} B"


def _place(source: Source) -> str:
    if source.hub:
        return "hf:" + ":".join(filter(None, (source.hub.name, source.hub.config, source.hub.split)))
    places = [source.listing.url] if source.listing else [file.url for file in source.files] or source.paths
    return ", ".join(map(str, places))


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = (
        "  ".join(
            f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(cells)
