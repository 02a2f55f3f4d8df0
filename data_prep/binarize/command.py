"""``smlp data binarize``: its options, the files of each split, and the shards and manifest that it writes."""

from __future__ import annotations

import argparse
import shlex
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.binarize import encoding
from data_prep.binarize.encoding import DOCUMENTS, LINES, PIECES, SEGMENTS, Job, check_tokenizer, encode_part
from data_prep.binarize.shards import merge_part, shard_folders, token_type, tokens_of_plan, write_plans
from data_prep.corpus import SPLITS
from data_prep.flow.documents import FORMATS
from data_prep.flow.manifest import MANIFEST, Counts, PartResult, counts_of, is_whole, read_manifest, write_manifest
from data_prep.flow.options import (
    add_number,
    add_reading_options,
    add_run_options,
    add_tokenizer_option,
    check_apart,
    reading_of,
    reading_settings,
    run_of,
    tokenizer_files,
    tokenizer_setting,
)
from data_prep.flow.parts import FilePart, files_in, find_files, plan_parts, report_left_out
from data_prep.flow.running import Finished, Report, StepRun, begin, note_files, run_parts
from data_prep.flow.streams import suffix_of, write_bytes
from smlp.cli.numbers import whole
from smlp.cli.options import refuse_unused
from smlp.errors import UserError

PART_BYTES = 32 << 20
MOST_SHARDS = 1 << 16  # each shard is a folder with a dictionary
DESCRIPTION = """encode text as fairseq's binary data: train, valid and test (.bin, .idx), with dictionary and tokenizer

A paragraph becomes a line of tokens that ends in </s>; an empty line, a lone </s>, ends a document. With --shards N the
documents of train are divided among N folders, of which fairseq-train OUT/shard00:OUT/shard01:... reads one per epoch.
valid and test are in the first folder, where fairseq looks for them. With one shard, all files are in OUT itself."""
EPILOG = """examples:
  smlp data binarize --in data/sample --tokenizer data/tokenizer --out data/bin --shards 8
  smlp data binarize --format lines --train train.txt --valid valid.txt --tokenizer data/tokenizer --out data/bin
  smlp data binarize --format pieces --in spm-encoded --tokenizer data/tokenizer --out data/bin
"""
# suffixes searched for in folders; files that are named directly may have any suffix
SUFFIXES = {DOCUMENTS: FORMATS, LINES: (".txt",), PIECES: (".spm", ".bpe", ".txt")}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the step."""
    group = parser.add_argument_group("input")
    group.add_argument(
        "--in",
        dest="sample",
        type=Path,
        metavar="DIR",
        help="folder with the folders train, valid and test, or with files of these names",
    )
    for split in SPLITS:
        group.add_argument(
            f"--{split}", type=Path, nargs="+", metavar="PATH", help="instead of --in: its files, or folders of them"
        )
    group.add_argument(
        "--format",
        choices=encoding.FORMATS,
        default="documents",
        help="documents; lines: each line of text as it is, an empty one too; pieces: lines of symbols of the "
        "dictionary with spaces between them, as fairseq-preprocess reads them (default: documents)",
    )
    add_reading_options(group)
    parser.set_defaults(part_bytes=PART_BYTES)
    group = parser.add_argument_group("output")
    add_tokenizer_option(group)
    add_number(group, "--shards", whole(1, MOST_SHARDS), "folders among which train is divided (default: 1)", 1)
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    """Encode, merge, write the manifest; return the exit status."""
    groups = ((f"--format {DOCUMENTS}", args.format == DOCUMENTS, ["text_field", "documents"]),)
    refuse_unused(args, add_options, "{option} would not be used: it is for {companion}", groups)
    if ":" in str(args.out):
        raise UserError(f"--out {args.out} has a colon, at which fairseq-train would divide it: name another folder")
    splits = parts_of_splits(args)
    vocab_size = len(check_tokenizer(args.tokenizer, args.format))
    settings = _settings(args)
    run, job = run_of(args), Job(args.tokenizer, args.format, reading_of(args), args.shards)
    begin(run, "binarize", settings, args.restart)
    done = Report("binarize", run)
    if not is_whole(run.out):
        (run.out / MANIFEST).unlink(missing_ok=True)
    finished = _encode(run, splits, job)
    if (run.out / MANIFEST).is_file() and not is_whole(run.out, _inputs(finished), settings):  # an output is missing
        (run.out / MANIFEST).unlink()
        finished = _encode(run, splits, job)
    missing = sum(done.missing for done in finished.values())
    if missing or run.share[1] > 1:
        print(f"{missing} parts are not encoded yet; when all are, run this without --share to write the shards")
        return 0
    if not (run.out / MANIFEST).is_file():
        _merge(run, finished, args, vocab_size, settings)
    shutil.rmtree(run.out / SEGMENTS, ignore_errors=True)
    manifest = read_manifest(run.out, "binarize")
    return done.finished(manifest, *_facts(manifest, args.shards, done))


def parts_of_splits(args: argparse.Namespace) -> dict[str, list[FilePart]]:
    """Return the parts of each split that is present, named after it.

    Raises:
        UserError: a file is missing, or there is no split at all.
    """
    suffixes = SUFFIXES[args.format]
    splits: dict[str, list[FilePart]] = {}
    for split, inputs in _inputs_of_splits(args, suffixes).items():
        parts = plan_parts(
            find_files(inputs, suffixes),
            args.part_bytes,
            cut_text=args.documents != "file",
            all_lines=args.format != DOCUMENTS,
        )
        splits[split] = [replace(part, name=f"{split}--{part.name}") for part in parts]
    read = {part.path for parts in splits.values() for part in parts}
    named = [place for split in SPLITS for place in getattr(args, split) or ()]
    report_left_out(named if args.sample is None else [args.sample], suffixes, read)
    return splits


def _inputs_of_splits(args: argparse.Namespace, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    named = {split: getattr(args, split) for split in SPLITS if getattr(args, split)}
    if (args.sample is None) == (not named):
        raise UserError("name the text with --in DIR or with --train, --valid and --test, not both")
    if args.sample is None:
        return named
    found = {split: _of_split(args.sample, split, suffixes) for split in SPLITS}
    if not found["train"]:
        kinds = ", ".join(suffixes)
        raise UserError(f"--in {args.sample} holds no folder or file train with text (files end in {kinds})")
    check_apart(args.out, [place for inputs in found.values() for place in inputs])
    return {split: inputs for split, inputs in found.items() if inputs}


def _of_split(sample: Path, split: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return a folder that has the split's name and holds files, or else the files of that name."""
    if (sample / split).is_dir() and files_in(sample / split, suffixes):
        return [sample / split]
    return sorted(
        path
        for path in sample.glob(f"{split}.*")
        if path.is_file() and path.name.split(".")[0] == split and suffix_of(path) in suffixes
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    inputs = {"in": None if args.sample is None else str(args.sample)}
    inputs |= {split: list(map(str, getattr(args, split) or ())) for split in SPLITS}
    tokenizer = tokenizer_setting(args.tokenizer)
    return {**inputs, "format": args.format, **reading_settings(args), "tokenizer": tokenizer, "shards": args.shards}


def _encode(run: StepRun, splits: dict[str, list[FilePart]], job: Any) -> dict[str, Finished]:
    finished = {}
    for split, parts in splits.items():
        work = partial(encode_part, job=job if split == "train" else replace(job, num_shards=1))
        finished[split] = run_parts(run, split, parts, work, temporary=True)
    return finished


def _inputs(finished: dict[str, Finished]) -> list[dict[str, Any]]:
    return [row for done in finished.values() for row in done.inputs]


def _merge(
    run: StepRun, finished: dict[str, Finished], args: argparse.Namespace, vocab_size: int, settings: dict[str, Any]
) -> None:
    """Write the shards, then the manifest."""
    dtype, folders, plans = token_type(vocab_size), shard_folders(args.shards), []
    written = {split: done for split, done in finished.items() if not _left_out(split, done, args)}
    for split, done in written.items():
        own = folders if split == "train" else folders[:1]
        parts = write_plans(run.out, split, done.results, own, args.format != DOCUMENTS, dtype)
        empty = sum(tokens_of_plan(part) == 0 for part in parts)
        if empty:
            what = f"{empty} of {len(own)} shards of {split} are" if len(own) > 1 else f"{split} is"
            counts = counts_of(done.results)
            dropped = ", ".join(f"{number:,} {reason}" for reason, number in counts.dropped.items())
            raise UserError(
                f"{what} empty: there are too few documents ({counts.documents_in:,}, dropped: {dropped or 0}) or, "
                "where lines are read, too few parts: lower --shards or --part-bytes (with --restart)"
            )
        plans += parts
    merged = run_parts(run, "merge", plans, merge_part).results
    sources = {f"{folder}{path.name}": path for folder in folders for path in tokenizer_files(args.tokenizer)}
    note_files(run.out, sources)
    beside = [write_bytes(run.out / name, path.read_bytes(), run.out) for name, path in sources.items()]
    encoded = [replace(result, outputs=[]) for done in finished.values() for result in done.results]
    facts = {"splits": {}, "dictionary": vocab_size, "dtype": dtype.str}
    for split, done in written.items():
        rows = [row for result in merged for row in result.outputs if Path(row["name"]).name == f"{split}.bin"]
        sums = {name: sum(row[name] for row in rows) for name in ("tokens", "lines", "ends")}
        sums["unknown"] = sum(result.facts["unknown"] for result in done.results)
        facts["splits"][split] = {**sums, "unknown_share": sums["unknown"] / sums["tokens"]}
    write_manifest(
        run.out, "binarize", settings, _inputs(finished), [*encoded, *merged, PartResult(beside, Counts())], facts
    )


def _left_out(split: str, done: Finished, args: argparse.Namespace) -> bool:
    """Return whether a valid or test split of ``--in`` is empty and therefore left out."""
    empty = all(not result.counts.documents_in and not result.facts["segments"] for result in done.results)
    return empty and split != "train" and args.sample is not None


def _facts(manifest: dict[str, Any], num_shards: int, done: Report) -> list[str]:
    """Return lines for the terminal: what each split holds, the rate, and how to train on train."""
    lines = [
        f"{split:<5} {row['tokens']:>15,} tokens {row['lines']:>12,} lines {row['ends']:>11,} ends of documents "
        f"{row['unknown_share']:.4%} unknown"
        for split, row in manifest["splits"].items()
    ]
    tokens = sum(row["tokens"] for row in manifest["splits"].values())
    folders = ":".join(str(done.run.out / folder) for folder in shard_folders(num_shards))
    without = "" if "valid" in manifest["splits"] else " --disable-validation (there is no split valid: see --valid)"
    rate = "" if done.run.resumed else f"{tokens / (time.perf_counter() - done.start):,.0f} tokens/s"
    train = f"to train: smlp train {shlex.quote(folders)}{without}" if "train" in manifest["splits"] else ""
    return [*lines, *filter(None, ["; ".join(filter(None, (rate, train)))])]
