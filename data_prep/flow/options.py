"""Options that the steps of ``smlp data`` share."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_prep.flow.documents import DOCUMENTS_OF_TEXT, FILES, FORMATS, ReadSettings
from data_prep.flow.manifest import MANIFEST, STATE, read_manifest
from data_prep.flow.parts import (
    PART_BYTES,
    FilePart,
    find_files,
    linked_folders,
    plan_parts,
    report_left_out,
    unfinished,
)
from data_prep.flow.running import StepRun
from data_prep.flow.streams import sha256_of
from smlp.cli.numbers import MOST_BYTES, MOST_PROCESSES, MOST_SECONDS, real, whole
from smlp.errors import UserError
from smlp.text.tokenizer import Tokenizer, load_tokenizer
from smlp.text.tokenizer_files import DICTIONARY, TOKENIZER_FILES

COMPRESSIONS = {"gz": ".gz", "zst": ".zst", "none": ""}


def add_tokenizer_option(group: Any, more: str = "") -> None:
    """Declare ``--tokenizer``, a required folder; ``more`` is appended to its help."""
    group.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="DIR",
        help=f"dict.txt, with sentencepiece.model or encoder.json{more}",
    )


def add_run_options(parser: argparse.ArgumentParser, out_required: bool = True) -> None:
    """Declare ``--out``, ``--workers``, ``--share``, ``--restart``, ``--quiet``."""
    group = parser.add_argument_group("running")
    group.add_argument(
        "--out",
        type=Path,
        required=out_required,
        metavar="DIR",
        help="folder to write; run the command again to continue",
    )
    add_number(
        group, "--workers", whole(1, MOST_PROCESSES), "processes (default: one for each core)", os.cpu_count() or 1
    )
    group.add_argument(
        "--share",
        type=_share,
        default=(0, 1),
        metavar="K/N",
        help="work only on every N-th part, from the K-th on (K counts from 0): for the tasks of a job array",
    )
    group.add_argument("--restart", action="store_true", help="delete what a run with other settings left in --out")
    group.add_argument("--quiet", action="store_true", help="show no progress")


#: names of options with documents, and with other files that a step reads
_READ = ("inputs", "held_out", "train", "valid", "test")
_ALSO_READ = ("tokenizer", "folder", "sample", "decontaminate", "encoder_json", "vocab_bpe")


def run_of(args: argparse.Namespace) -> StepRun:
    """Return the run that :func:`add_run_options` describes.

    Raises:
        UserError: the folder is inside one that is read, or holds what is read.
    """
    for name in (*_READ, *_ALSO_READ):
        value = getattr(args, name, None) or []
        places = [value] if isinstance(value, Path) else value if isinstance(value, list) else []
        if name in _READ:
            check_apart(args.out, places)
        check_outside(args.out, places)
    args.out.mkdir(parents=True, exist_ok=True)
    return StepRun(args.out, args.workers, args.share, args.quiet)


def check_apart(out: Path, places: Iterable[Path]) -> None:
    """Raise UserError if a folder to write is inside one of those that are read, also through a link."""
    real = out.resolve()
    for place in places:
        if place.is_dir() and any(map(real.is_relative_to, (place.resolve(), *linked_folders(place)))):
            raise UserError(f"--out {out} lies in the input {place}: the next run would read its own output")


def check_outside(out: Path, places: Iterable[Path]) -> None:
    """Raise UserError if one of those that are read is inside a folder to write: ``--restart`` would delete it."""
    for place in places:
        if out.is_dir() and place.resolve().is_relative_to(out.resolve()):
            raise UserError(f"the input {place} lies in --out {out}: name another --out")


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Declare ``--in`` and how documents are read from files."""
    group = parser.add_argument_group("input")
    group.add_argument(
        "--in",
        dest="inputs",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files of documents, or folders of them: {FILES}",
    )
    add_reading_options(group)


def add_reading_options(group: Any) -> None:
    """Declare how documents are read from files, for a parser or a group of one."""
    group.add_argument(
        "--text-field", default="text", metavar="NAME", help="field of .jsonl or column of .parquet that holds the text"
    )
    group.add_argument(
        "--documents",
        choices=DOCUMENTS_OF_TEXT,
        default="blank",
        help="a document in .txt: the text between empty lines, each line, or the whole file (default: blank)",
    )
    add_bytes_option(group)
    add_number(group, "--part-bytes", whole(1, MOST_BYTES), "cut larger plain files into parts", PART_BYTES)


def add_number(
    group: Any, name: str, bounds: dict[str, Any], help: str, default: float | None = None, metavar: str = "N"
) -> None:
    """Declare an option that takes a number within the ``bounds`` that ``whole`` or ``real`` give."""
    group.add_argument(name, **bounds, default=default, metavar=metavar, help=help)


def add_bytes_option(group: Any) -> None:
    """Declare ``--max-document-bytes``."""
    add_number(
        group,
        "--max-document-bytes",
        whole(1, MOST_BYTES),
        "drop and count longer documents (of .jsonl, longer lines)",
        ReadSettings.max_bytes,
    )


def add_time_option(group: Any) -> None:
    """Declare ``--max-document-seconds``, for steps that parse documents."""
    add_number(
        group,
        "--max-document-seconds",
        real(0, MOST_SECONDS, above=True),
        "CPU time of a document; those that take longer are dropped, counted and named (default: %(default)g)",
        ReadSettings.max_seconds,
        metavar="S",
    )


def reading_of(args: argparse.Namespace) -> ReadSettings:
    """Return the settings for reading documents."""
    seconds = getattr(args, "max_document_seconds", ReadSettings.max_seconds)
    return ReadSettings(args.text_field, args.documents, args.max_document_bytes, seconds)


def parts_of(args: argparse.Namespace) -> list[FilePart]:
    """Return the parts of ``--in``."""
    found = find_files(args.inputs, FORMATS)
    report_left_out(args.inputs, FORMATS)
    return plan_parts(found, args.part_bytes, cut_text=args.documents != "file")


def input_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_input_options` that the output depends on, for the manifest."""
    return {"in": [str(path) for path in args.inputs], **reading_settings(args)}


def reading_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_reading_options` that the output depends on, for the manifest."""
    return {
        "text_field": args.text_field,
        "documents": args.documents,
        "max_document_bytes": args.max_document_bytes,
        "part_bytes": args.part_bytes,
    }


def add_compression(parser: argparse.ArgumentParser) -> None:
    """Declare ``--compress`` for files of documents."""
    parser.add_argument(
        "--compress", choices=COMPRESSIONS, default="gz", help="compression of the files written (default: gz)"
    )


@functools.lru_cache(maxsize=1)
def cached_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder, which is loaded once in each process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # parts already run in parallel
    return load_tokenizer(folder)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer's folder: its dictionary, and the model if there is one."""
    return [folder / name for name in (DICTIONARY, *TOKENIZER_FILES) if (folder / name).is_file()]


def tokenizer_setting(folder: Path) -> dict[str, Any]:
    """Return a tokenizer for a step's settings, with checksums, so that another one in the same folder is noticed.

    Raises:
        UserError: the folder is of a step that is not finished, or a file is not the one that its manifest names.
    """
    for problem in unfinished([folder / DICTIONARY]):
        raise UserError(f"--tokenizer: {problem}, or remove its {STATE} if the tokenizer is your own")
    sums = {path.name: sha256_of(path) for path in tokenizer_files(folder)}
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(UserError):  # without a manifest, or with that of something else, nothing is compared
        rows = read_manifest(folder)["outputs"]
    for row in rows:
        name = row.get("name")
        if name in sums and row.get("sha256") != sums[name]:
            raise UserError(
                f"{folder / name} is not the file that {folder / MANIFEST} names (it has another SHA-256): make the "
                f"tokenizer again, or remove the manifest and {folder / STATE} if you changed the file on purpose"
            )
    return {"path": str(folder), "sha256": sums}


def _share(text: str) -> tuple[int, int]:
    index, slash, number = text.partition("/")
    if not (slash and index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1")
    return int(index), int(number)
