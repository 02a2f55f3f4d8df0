"""``smlp data fetch``: its options, the tables that it prints, and its exit status."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.fetch.download import Patience
from data_prep.fetch.listing import months
from data_prep.fetch.sequence import fetch, has_same_settings, local_files, needed_bytes
from data_prep.fetch.source import Source, built_in, find_source
from data_prep.fetch.wanted import Wanted, free_bytes
from data_prep.flow.documents import DOCUMENTS_OF_TEXT, ReadSettings
from data_prep.flow.options import (
    add_bytes_option,
    add_compression,
    add_number,
    add_run_options,
    add_time_option,
    check_apart,
    check_outside,
)
from data_prep.flow.running import Report, StepRun, aligned, refuse_other_files
from smlp.cli.json_file import write_json
from smlp.cli.numbers import MOST_BYTES, MOST_PROCESSES, MOST_SECONDS, real, whole
from smlp.errors import UserError, one_line
from smlp.files import not_writable

DESCRIPTION = "download corpora, with checks, and turn them into documents for 'smlp data clean'"
EPILOG = """A source is a name from --list, hf:OWNER/NAME[:CONFIG][:SPLIT] (any dataset of the Hugging Face Hub), a file
SOURCE.toml of your own, or a file or folder of .txt, .jsonl or .parquet.

examples:
  smlp data fetch --list
  smlp data fetch --show cc-news
  smlp data fetch wikipedia cc-news openwebtext --out corpora --dry-run
  smlp data fetch wikipedia --set date=20260101 --out corpora --workers 8
  smlp data fetch cc-news --set months=2018-01:2018-03 --limit-files 20 --delete-downloads --out corpora
  smlp data fetch hf:wikimedia/wikipedia:20231101.en my/texts --out corpora
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the step."""
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="source to fetch")
    parser.add_argument("--list", action="store_true", help="list the available sources and exit")
    parser.add_argument("--show", metavar="SOURCE", help="show everything that is known about a source and exit")
    parser.add_argument("--json", metavar="FILE", help="write what --list, --show or --dry-run print as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check everything but the download and exit")
    group = parser.add_argument_group("what to fetch")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of a source, as date=20260101; SOURCE.NAME=VALUE for one of several",
    )
    add_number(group, "--limit-files", whole(), "the first N files or shards of each source only")
    add_number(group, "--limit-documents", whole(), "the first N documents of each file only")
    group.add_argument(
        "--text-field", metavar="NAME", help="field or column of the text (default: what the source says)"
    )
    group.add_argument(
        "--documents", choices=DOCUMENTS_OF_TEXT, help="a document in .txt (default: what the source says)"
    )
    add_bytes_option(group)
    add_time_option(group)
    group = parser.add_argument_group("downloads")
    add_number(group, "--connections", whole(1, MOST_PROCESSES), "files at a time (default: 3)", 3)
    add_number(
        group,
        "--timeout",
        real(0, MOST_SECONDS, above=True),
        "seconds without data after which an attempt fails (default: 60)",
        60.0,
        metavar="S",
    )
    add_number(group, "--attempts", whole(), "give up on a file after N failures without progress (default: 6)", 6)
    add_number(
        group,
        "--retry-wait",
        real(0, MOST_SECONDS),
        "seconds to wait after the first failure, doubled each time (default: 1)",
        1.0,
        metavar="S",
    )
    group.add_argument(
        "--delete-downloads",
        action="store_true",
        help="each worker downloads a file, converts it and deletes it: little disk, one connection a worker",
    )
    group.add_argument("--no-space-check", action="store_true", help="begin even if the disk seems to be too small")
    add_run_options(parser, out_required=False)
    add_compression(parser)
    add_number(parser, "--file-bytes", whole(1, MOST_BYTES), "start a new file after N bytes of documents", 256 << 20)


def run(args: argparse.Namespace) -> int:
    """Run the step; return 0 if everything that was asked for is there."""
    if args.list or args.show:
        alone = "--list" if args.list else "--show"
        others = {"SOURCE": args.sources, "--out": args.out, "--set": args.set, "--dry-run": args.dry_run}
        others["--show"] = args.list and args.show
        if given := [name for name, value in others.items() if value]:
            raise UserError(f"{alone} prints and exits: it takes no {', '.join(given)}")
    if args.list:
        return print_list(list(built_in().values()), args.json)
    if args.show:
        return print_one(find_source(args.show), args.json)
    if not args.sources:
        raise UserError("name a source to fetch; 'smlp data fetch --list' shows the available ones")
    if args.out is None:
        raise UserError("--out DIR is missing: name the folder for the documents")
    wanted = _wanted(args)
    for one in wanted:
        hub = [Path(one.source.hub.name)] if one.source.hub else []
        places = [*one.source.paths, *(place for place in hub if place.exists())]
        check_apart(one.run.out, places)
        check_outside(one.run.out, places)
    if args.dry_run:
        return _dry_run(wanted, args.json)
    if args.json:
        raise UserError(f"--json {args.json} would not be used: it is for --list, --show and --dry-run")
    if problem := not_writable(args.out):
        raise UserError(f"--out: {problem}")
    for one in wanted:
        if packages := one.missing_packages():
            raise UserError(
                f"{one.source.name} needs {', '.join(packages)}: install the extra 'data': pip install -e '.[data]'"
            )
    return max(_fetch_one(one) for one in wanted)


def _wanted(args: argparse.Namespace) -> list[Wanted]:
    sources = [find_source(name) for name in args.sources]
    for source in sources:
        if source.status == "gone":
            reason = "".join(f": {note}" for note in source.notes[:1])
            instead = f"; instead: {', '.join(source.replacement)}" if source.replacement else ""
            raise UserError(f"{source.name} is gone{reason}{instead}")
        if sum(other.name == source.name for other in sources) > 1:
            raise UserError(
                f"two sources would be written to {args.out / source.name}: rename one, or fetch them separately"
            )
    options = _options(sources, args.set)
    settings = {
        "compression": args.compress,
        "file_bytes": args.file_bytes,
        "limit_files": args.limit_files,
        "limit_documents": args.limit_documents,
        "connections": args.connections,
        "patience": Patience(args.attempts, args.retry_wait, timeout=args.timeout),
        "delete_downloads": args.delete_downloads,
        "check_space": not args.no_space_check,
        "restart": args.restart,
    }
    wanted = []
    for source in sources:
        reading = ReadSettings(
            args.text_field or source.text_field,
            args.documents or source.documents,
            args.max_document_bytes,
            args.max_document_seconds,
        )
        run = StepRun(args.out / source.name, args.workers, args.share, args.quiet)
        wanted.append(Wanted(source, args.out, run, options[source.name], reading, **settings))
    return wanted


def _options(sources: list[Source], words: list[str]) -> dict[str, dict[str, str]]:
    """Return the options of each source, with what ``--set`` says.

    Raises:
        UserError: a source has no such option, or the months are none.
    """
    options = {source.name: dict(source.options) for source in sources}
    for word in words:
        place, equals, value = word.partition("=")
        owner, point, name = place.rpartition(".")
        owners = [owner] if point else [source.name for source in sources if place in source.options]
        if not equals or not owners or any(name not in options.get(one, {}) for one in owners):
            there = ", ".join(f"{one}.{option}" for one, values in options.items() for option in values) or "none"
            raise UserError(f"--set {word} is not NAME=VALUE of an option of the sources; there are {there}")
        for one in owners:
            options[one][name] = value
    for values in options.values():
        if "months" in values:
            months(values["months"])
    return options


def _dry_run(wanted: list[Wanted], json_file: str | None) -> int:
    """Print what would be done and what prevents it; return 1 if anything does."""
    free, problem = free_bytes(wanted[0].out), not_writable(wanted[0].out)
    problems = [f"--out: {problem}"] if problem else []
    rows: list[dict[str, Any]] = []
    for one in wanted:
        packages, files = one.missing_packages(), one.known_files()
        problems += [f"{one.source.name}: not installed: {', '.join(packages)}"] if packages else []
        if has_same_settings(one) is False and not one.restart:
            problems.append(f"{one.run.out} holds work with other settings: name another --out, or add --restart")
        local: list[tuple[Path, Path]] = []
        try:
            local = local_files(one)
            refuse_other_files(one.run.out)
        except UserError as error:
            problems.append(f"{one.source.name}: {error}")
        number = len(local) or (one.source.size.files if files is None else len(files))
        number = number if number is None or one.limit_files is None else min(number, one.limit_files)
        rows.append(
            {
                "name": one.source.name,
                "from": one.source.kind,
                "files": number,
                **one.sizes(files),
                "needed_bytes": needed_bytes(one, local),
                "options": one.options,
            }
        )
    needed = sum(row["needed_bytes"] or 0 for row in rows)
    if needed > free and wanted[0].check_space:
        problems.append(f"about {needed / 1e9:,.1f} GB are needed in {wanted[0].out}, {free / 1e9:,.1f} GB are free")
    return print_plan(rows, free, problems, json_file)


def _fetch_one(wanted: Wanted) -> int:
    name = wanted.source.name
    ending = Report(f"fetch {name}", wanted.run)
    try:
        outcome = fetch(wanted)
    except UserError as error:
        print(f"smlp: error: {one_line(f'{name}: {error}')}", file=sys.stderr)
        return 1
    except OSError as error:  # of a disk: other sources may still be fetched
        problem = f"{name}: {error.filename or wanted.raw}: {error.strerror or error}"
        print(f"smlp: error: {one_line(problem)}", file=sys.stderr)
        return 1
    for problem in outcome.problems:
        print(f"failed: {one_line(problem)}", file=sys.stderr)
    if outcome.problems:
        print(f"{name} is not finished: run the same command again for what is missing", file=sys.stderr)
        return 1
    if outcome.manifest is None:
        return ending.waiting(outcome.finished, name)
    status = ending.finished(outcome.manifest, _shown(f"{wanted.source.title}; licence: {wanted.source.licence}"))
    if status == 0 and not outcome.manifest["counts"]["kept"]:
        places = f"{wanted.run.out} and {wanted.raw}" if wanted.source.from_web else f"{wanted.run.out}"
        problem = f"{name}: there is no document in it; once it has some, remove {places} and fetch it again"
        print(f"smlp: error: {one_line(problem)}", file=sys.stderr)
        return 1
    return status


def print_list(sources: Sequence[Source], json_file: str | None) -> int:
    """Print a line for each source: where it comes from, its size, licence and status."""
    rows = [("name", "from", "download", "text", "licence", "status")]
    for source in sources:
        status = f"gone: use {' or '.join(source.replacement)}" if source.status == "gone" else source.status
        sizes = size(source.size.bytes), size(source.size.text_bytes)
        rows.append(
            (source.name, source.kind, *sizes, textwrap.shorten(source.licence, 50, placeholder=" ..."), status)
        )
    print(aligned(rows, right=(2, 3)))
    write_json(json_file, [as_json(source) for source in sources])
    return 0


def print_one(source: Source, json_file: str | None) -> int:
    """Print everything that is known of a source."""
    print(_shown(f"{source.name}: {source.title}"))
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
    print("\n".join(f"  {name:<11}{_shown(value)}" for name, value in lines if value))
    write_json(json_file, as_json(source))
    return 0


def as_json(source: Source) -> dict[str, Any]:
    """Return a source without its file's text."""
    row = asdict(source)
    del row["definition"]
    return {"kind": source.kind, **row, "paths": [str(path) for path in source.paths]}


def print_plan(rows: list[dict[str, Any]], free: int, problems: list[str], json_file: str | None) -> int:
    """Print what would be fetched; return 1 if something prevents it."""
    lines = [("name", "from", "files", "download", "documents", "disk needed", "options")]
    for row in rows:
        number = "?" if row["files"] is None else f"{row['files']:,}"
        sizes = [size(row[name]) for name in ("download_bytes", "document_bytes", "needed_bytes")]
        options = _shown(", ".join(f"{name}={value}" for name, value in row["options"].items()))
        lines.append((row["name"], row["from"], number, *sizes, options))
    print(aligned(lines, right=(2, 3, 4, 5)))
    print(f"free disk: {size(free)}; '?' is not known beforehand")
    for problem in problems:
        print(f"problem: {_shown(problem)}")
    write_json(json_file, {"sources": rows, "free_bytes": free, "problems": problems})
    return 1 if problems else 0


def size(num_bytes: int | None) -> str:
    """Write bytes for people; ``?`` if they are unknown."""
    if num_bytes is None:
        return "?"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes} B"


def _shown(text: str) -> str:
    """Write on one line what a source's file says, which may be somebody else's."""
    return one_line(text.replace("\n", r"\n"))  # else it would keep those of lists


def _place(source: Source) -> str:
    if source.hub:
        return "hf:" + ":".join(filter(None, (source.hub.name, source.hub.config, source.hub.split)))
    places = [source.listing.url] if source.listing else [file.url for file in source.files] or source.paths
    return ", ".join(map(str, places))
