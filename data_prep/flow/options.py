"""Options that the steps of ``smlp data`` share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_prep.flow.documents import DOCUMENTS_OF_TEXT, FORMATS, Reading
from data_prep.flow.parts import PART_BYTES, Part, find_files, left_out, plan_parts
from data_prep.flow.running import Run
from data_prep.flow.streams import sha256_of
from smlp.cli.numbers import MOST_BYTES, MOST_PROCESSES, MOST_SECONDS, real, whole
from smlp.errors import UserError
from smlp.text.tokenizer_files import DICTIONARY, TOKENIZER_FILES

NOT_TEXT = "not text: half of a surrogate pair"


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer's folder: its dictionary, and the model where there is one."""
    return [folder / name for name in (DICTIONARY, *TOKENIZER_FILES) if (folder / name).is_file()]


def tokenizer_setting(folder: Path) -> dict[str, Any]:
    """A tokenizer among a step's settings, so that another one in the same folder is noticed."""
    return {"path": str(folder), "sha256": {path.name: sha256_of(path) for path in tokenizer_files(folder)}}


COMPRESSIONS = {"gz": ".gz", "zst": ".zst", "none": ""}


def add_run_options(parser: argparse.ArgumentParser, out_required: bool = True) -> None:
    """``--out``, ``--workers``, ``--share``, ``--restart``, ``--quiet``."""
    group = parser.add_argument_group("running")
    group.add_argument(
        "--out", type=Path, required=out_required, metavar="DIR", help="folder to write; run again to go on"
    )
    add_number(
        group, "--workers", whole(1, MOST_PROCESSES), "processes (default: one for each core)", os.cpu_count() or 1
    )
    group.add_argument(
        "--share",
        type=_share,
        default=(0, 1),
        metavar="K/N",
        help="work on every N-th part only, from the K-th on, K counted from 0: for the tasks of a job array",
    )
    group.add_argument("--restart", action="store_true", help="throw away what a run with other settings left in --out")
    group.add_argument("--quiet", action="store_true", help="no progress")


def run_of(args: argparse.Namespace) -> Run:
    """What :func:`add_run_options` was given. Raises UserError if the folder lies in one that is read."""
    for name in ("inputs", "held_out", "train", "valid", "test"):
        value = getattr(args, name, None) or []
        check_apart(args.out, [value] if isinstance(value, Path) else value if isinstance(value, list) else [])
    args.out.mkdir(parents=True, exist_ok=True)
    return Run(args.out, args.workers, args.share, args.quiet)


def check_apart(out: Path, places: Iterable[Path]) -> None:
    """Refuse a folder to write that lies in one of those that are read.

    Raises:
        UserError: it does.
    """
    for place in places:
        if place.is_dir() and out.resolve().is_relative_to(place.resolve()):
            raise UserError(f"--out {out} lies in {place}, which is read: the next run would read its output")


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """``--in`` and how documents are read from files."""
    group = parser.add_argument_group("input")
    group.add_argument(
        "--in",
        dest="inputs",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files of documents, or folders of them: {', '.join(FORMATS)}, plain, .gz, .zst, .xz or .bz2",
    )
    add_reading_options(group)


def add_reading_options(group: Any) -> None:
    """How documents are read from files, for a parser or a group of one."""
    group.add_argument("--text-field", default="text", metavar="NAME", help="of .jsonl, and column of .parquet")
    group.add_argument(
        "--documents",
        choices=DOCUMENTS_OF_TEXT,
        default="blank",
        help="a document in .txt: what stands between empty lines, each line, or the whole file (default: blank)",
    )
    add_bytes_option(group)
    add_number(group, "--part-bytes", whole(1, MOST_BYTES), "larger plain files are cut into parts", PART_BYTES)


def add_number(
    group: Any, name: str, bounds: dict[str, Any], help: str, default: float | None = None, metavar: str = "N"
) -> None:
    """Add an option that takes a number within the ``bounds`` that ``whole`` or ``real`` give."""
    group.add_argument(name, **bounds, default=default, metavar=metavar, help=help)


def add_bytes_option(group: Any) -> None:
    """``--max-document-bytes``."""
    add_number(
        group, "--max-document-bytes", whole(1, MOST_BYTES), "longer ones are dropped and counted", Reading.max_bytes
    )


def add_time_option(group: Any) -> None:
    """``--max-document-seconds``, of steps that take documents apart."""
    add_number(
        group,
        "--max-document-seconds",
        real(0, MOST_SECONDS, above=True),
        "of CPU time; documents that take longer are dropped, counted and named (default: %(default)g)",
        Reading.max_seconds,
        metavar="S",
    )


def reading_of(args: argparse.Namespace) -> Reading:
    """How documents are to be read."""
    seconds = getattr(args, "max_document_seconds", Reading.max_seconds)
    return Reading(args.text_field, args.documents, args.max_document_bytes, seconds)


def parts_of(args: argparse.Namespace) -> list[Part]:
    """The parts of ``--in``."""
    found = find_files(args.inputs, FORMATS)
    if not args.quiet:
        for line in left_out(args.inputs, FORMATS):
            print(line, file=sys.stderr)
    return plan_parts(found, args.part_bytes, cut_text=args.documents != "file")


def input_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the output depends on among the options of :func:`add_input_options`, for the manifest."""
    return {"in": [str(path) for path in args.inputs], **reading_settings(args)}


def reading_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the output depends on among the options of :func:`add_reading_options`, for the manifest."""
    return {
        "text_field": args.text_field,
        "documents": args.documents,
        "max_document_bytes": args.max_document_bytes,
        "part_bytes": args.part_bytes,
    }


def add_compression(parser: argparse.ArgumentParser) -> None:
    """``--compress`` of files of documents."""
    parser.add_argument("--compress", choices=COMPRESSIONS, default="gz", help="of what is written (default: gz)")


def _share(text: str) -> tuple[int, int]:
    index, slash, number = text.partition("/")
    if not (slash and index.isdigit() and number.isdigit() and int(index) < int(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1")
    return int(index), int(number)
