"""The step ``inspect``: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.flow.progress import bytes_bar
from data_prep.flow.streams import write_bytes
from smlp.cli.numbers import whole
from smlp.errors import UserError

if TYPE_CHECKING:
    from data_prep.inspecting.checks import Inspection
    from smlp.text.tokenizer import Tokenizer, Vocabulary

TOP = 20  # symbols shown
DESCRIPTION = """what binary data hold, and whether they are whole

Reads every token once: counts, lengths of documents, most frequent symbols, unknown ones; checks that every file opens,
that sizes and positions in .idx fit .bin, that every line ends in </s> and the last document is complete, that all ids
are in the dictionary, and that all is as the manifest says. Exit status 1 and a line for each check that fails."""
EPILOG = """examples:
  smlp data inspect data/bin
  smlp data inspect data/bin --verify --samples 5 --plot lengths.png --json report.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the step."""
    parser.add_argument("folder", type=Path, metavar="BIN_DIR", help="what 'smlp data binarize' or another tool wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw how long documents are")
    parser.add_argument("--samples", **whole(0), default=3, metavar="N", help="documents of each split to show (3)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--verify", action="store_true", help="compare every file with its checksum in the manifest")


def run(args: argparse.Namespace) -> int:
    """Reads, prints and writes; returns 1 if something is wrong."""
    from data_prep.inspecting.checks import bytes_to_read, inspect
    from data_prep.inspecting.plot import check_plot, plot_lengths
    from smlp.cli.json_file import check_output

    if args.json:
        check_output("--json", str(args.json))
    if args.plot:
        check_plot(args.plot)
        if args.json and args.json.resolve() == args.plot.resolve():
            raise UserError(f"--json and --plot both name {args.json}: one would be lost")
    with bytes_bar(bytes_to_read(args.folder, args.verify), "inspect", args.quiet) as bar:
        found = inspect(args.folder, args.verify, bar.update)
    splits, tokenizer = found.by_split(), _tokenizer(args, found)
    report: dict[str, Any] = {
        "files": {name: statistics.to_json() for name, statistics in found.files.items()},
        "splits": {name: statistics.to_json() for name, statistics in splits.items()},
        "top": {name: _named(statistics.top(TOP), found.vocabulary, tokenizer) for name, statistics in splits.items()},
        "samples": _samples(args.folder, found, tokenizer, args.samples),
        "problems": found.problems,
    }
    _show(report)
    if args.json:
        write_bytes(args.json, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    if args.plot:
        plot_lengths(splits, args.plot)
    for problem in found.problems:
        print(f"FAILED: {problem}")
    if not found.problems:
        print(f"{args.folder}: {len(found.files)} files are whole")
    return 1 if found.problems else 0


def _tokenizer(args: argparse.Namespace, found: Inspection) -> Tokenizer | None:
    """Of the first file's folder; None where there is no file, or nobody wants samples and there is none."""
    from smlp.text.tokenizer import Tokenizer
    from smlp.text.tokenizer_files import find_tokenizer

    if not found.files:
        return None
    try:
        return Tokenizer(found.vocabulary, find_tokenizer([(args.folder / next(iter(found.files))).parent]))
    except UserError:
        if args.samples:
            raise
        return None


def _named(top: dict[int, int], vocabulary: Vocabulary, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Symbols with their counts and the text that they stand for."""
    rows = [{"symbol": vocabulary.symbols[token], "count": count} for token, count in top.items()]
    if tokenizer is not None:
        for row, token in zip(rows, top, strict=True):
            row["text"] = tokenizer.content(token).decode("utf-8", "replace")
    return rows


def _samples(folder: Path, found: Inspection, tokenizer: Tokenizer | None, number: int) -> dict[str, list[str]]:
    """Decoded documents of the first file of each split."""
    from data_prep.inspecting.samples import samples_of

    samples: dict[str, list[str]] = {}
    for name in found.files if number else ():
        if Path(name).name not in samples:
            samples[Path(name).name] = samples_of(folder / name, tokenizer, number)
    return samples


def _show(report: dict[str, Any]) -> None:
    rows = [*report["files"].items()]
    if len(rows) > len(report["splits"]):
        rows += [(f"all {name}", row) for name, row in report["splits"].items()]
    width = max((len(name) for name, _ in rows), default=0)
    for name, row in rows:
        print(
            f"{name:<{width}} {row['tokens']:>15,} tokens {row['lines']:>12,} lines {row['documents']:>11,} documents "
            f"of {row['shortest']:,} to {row['longest']:,}, mean {row['tokens_per_document']:,.0f}; "
            f"{row['unknown_share']:.4%} unknown"
        )
    for name, top in report["top"].items():
        print(
            f"most frequent in {name}: "
            + ", ".join(f"{row.get('text', row['symbol'])!r} {row['count']:,}" for row in top)
        )
    for name, texts in report["samples"].items():
        for text in texts:
            print(f"--- from {name}\n{text}")
    if report["samples"]:
        print("---")
