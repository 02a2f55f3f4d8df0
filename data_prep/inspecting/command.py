"""``smlp data inspect``: its options, what it prints, and its plot of the documents' lengths."""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.flow.manifest import MANIFEST
from data_prep.flow.options import add_number
from data_prep.flow.workers import bytes_bar
from data_prep.inspecting.checks import Inspection, Statistics, bytes_to_read, inspect
from data_prep.inspecting.token_file import samples_of
from smlp.cli.json_file import check_output, write_json
from smlp.cli.numbers import whole
from smlp.errors import UserError, one_line
from smlp.files import check_writable, write_whole
from smlp.plots.drawing import check_matplotlib, legend
from smlp.text.tokenizer import Tokenizer, Vocabulary
from smlp.text.tokenizer_files import find_tokenizer

DESCRIPTION = """show what binary data contain, and verify them

Reads every token: counts, lengths of documents, most frequent symbols, unknown ones; checks that every file opens,
that sizes and positions in .idx fit .bin, that every line ends in </s> and the last document is complete, that all ids
are in the dictionary, and that all is as the manifest says. Exit status 1 and a line for each check that fails."""
EPILOG = """examples:
  smlp data inspect data/bin
  smlp data inspect data/bin --verify --samples 5 --plot lengths.png --json report.json
"""
TOP = 20  # symbols shown
_PNG = b"\x89PNG"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the step."""
    parser.add_argument(
        "folder", type=Path, metavar="BIN_DIR", help="data that 'smlp data binarize' or another tool wrote"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw how long documents are")
    add_number(parser, "--samples", whole(0), "documents of each split to show (3)", 3)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--verify", action="store_true", help="compare every file with its checksum in the manifest")


def run(args: argparse.Namespace) -> int:
    """Read, print and write; return 1 if something is wrong."""
    if args.json:
        check_output("--json", str(args.json))
    if args.plot:
        check_plot(args.plot)
        if args.json and args.json.resolve() == args.plot.resolve():
            raise UserError(f"--json and --plot both name {args.json}: one would overwrite the other")
    with bytes_bar(bytes_to_read(args.folder, args.verify), "inspect", args.quiet) as bar:
        found = inspect(args.folder, args.verify, bar.update)
    splits, tokenizer = found.by_split(), _tokenizer(args, found)
    report: dict[str, Any] = {
        "files": {name: statistics.to_json() for name, statistics in found.files.items()},
        "splits": {name: statistics.to_json() for name, statistics in splits.items()},
        "top": {name: _named(statistics.top(TOP), found.vocabulary, tokenizer) for name, statistics in splits.items()},
        "samples": _samples(args.folder, found, tokenizer, args.samples if tokenizer else 0),
        "problems": found.problems,
    }
    _show(report)
    for problem in found.problems:
        print(f"FAILED: {one_line(problem)}")
    if args.verify and not (args.folder / MANIFEST).is_file():
        print(f"no checksum was compared: {args.folder} has no {MANIFEST}")
    if not found.problems:
        print(f"{args.folder}: {len(found.files)} files are whole")
    if args.json:
        write_json(str(args.json), report)
    if args.plot:
        plot_lengths(splits, args.plot)
    return 1 if found.problems else 0


def check_plot(path: Path) -> None:
    """Check before the work that a picture can be written.

    Raises:
        UserError: matplotlib is not installed, or no picture can be written there.
    """
    check_matplotlib()
    if not path.parent.is_dir():
        raise UserError(f"cannot write --plot {path}: there is no folder {path.parent}")
    check_writable(path.resolve() if path.is_symlink() else path, "--plot")
    if path.is_file() and path.stat().st_size:
        with open(path, "rb") as file:
            if file.read(len(_PNG)) != _PNG:
                raise UserError(f"--plot {path}: a file of another kind exists already: name another one")


def _tokenizer(args: argparse.Namespace, found: Inspection) -> Tokenizer | None:
    """Return the tokenizer of the first file's folder; None if there is no file, or no tokenizer that can be used.

    If samples are wanted, one that cannot be used is a problem of the data.
    """
    if not found.files:
        return None
    folder = (args.folder / next(iter(found.files))).parent
    model = find_tokenizer([folder])
    try:
        return Tokenizer(found.vocabulary, model)
    except UserError as error:
        if args.samples and model is not None:
            found.problems.append(str(error))
        elif args.samples:
            print(f"smlp: no samples: {folder} has no tokenizer")
        return None


def _named(top: dict[int, int], vocabulary: Vocabulary, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Return symbols with their counts and the text that they stand for."""
    rows = [{"symbol": vocabulary.symbols[token], "count": count} for token, count in top.items()]
    if tokenizer is not None:
        for row, token in zip(rows, top, strict=True):
            row["text"] = tokenizer.content(token).decode("utf-8", "replace")
    return rows


def _samples(folder: Path, found: Inspection, tokenizer: Tokenizer | None, number: int) -> dict[str, list[str]]:
    """Return decoded documents of the first file of each split."""
    samples: dict[str, list[str]] = {}
    for name in found.files if number else ():
        if Path(name).name not in samples:
            samples[Path(name).name] = samples_of(folder / name, tokenizer, number)
    return samples


def _show(report: dict[str, Any]) -> None:
    rows = [(one_line(name), row) for name, row in report["files"].items()]
    if len(rows) > len(report["splits"]):
        rows += [(f"all {one_line(name)}", row) for name, row in report["splits"].items()]
    width = max((len(name) for name, _ in rows), default=0)
    for name, row in rows:
        print(
            f"{name:<{width}} {row['tokens']:>15,} tokens {row['lines']:>12,} lines {row['documents']:>11,} documents "
            f"of {row['shortest']:,} to {row['longest']:,}, mean {row['tokens_per_document']:,.0f}; "
            f"{row['unknown_share']:.4%} unknown"
        )
    for name, top in report["top"].items():
        print(
            f"most frequent in {one_line(name)}: "
            + ", ".join(f"{row.get('text', row['symbol'])!r} {row['count']:,}" for row in top)
        )
    for name, texts in report["samples"].items():
        for text in texts:
            shown = re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda sign: repr(sign[0])[1:-1], text)
            print(f"--- from {one_line(name)}\n{shown}")
    if report["samples"]:
        print("---")


def plot_lengths(splits: dict[str, Statistics], path: Path) -> None:
    """Write a PNG: the share of documents by their number of tokens, a line for each split.

    Raises:
        UserError: there is no document, or the file cannot be written.
    """
    import matplotlib

    splits = {name: statistics for name, statistics in splits.items() if statistics.documents}
    if not splits:
        raise UserError("--plot: there is no document whose length could be drawn")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    used = np.flatnonzero(sum(statistics.histogram for statistics in splits.values()))
    powers = np.arange(used[0], used[-1] + 1)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, statistics in splits.items():
        shares = statistics.histogram[powers] / statistics.documents
        label = f"{statistics.documents:,} of {one_line(name)}"  # one that begins with "_" would have no entry
        axes.stairs(shares, 2.0 ** np.append(powers, powers[-1] + 1), label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("share of documents")
    legend(axes, title="documents")
    figure.tight_layout()
    figure.savefig(drawn := io.BytesIO(), dpi=120, format="png")
    pyplot.close(figure)
    write_whole(path.resolve() if path.is_symlink() else path, drawn.getvalue())
