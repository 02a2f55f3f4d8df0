"""The files of train, valid and test."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from data_prep.binarize.encoding import DOCUMENTS, LINES, PIECES
from data_prep.corpus import SPLITS
from data_prep.flow.documents import FORMATS
from data_prep.flow.parts import Part, find_files, plan_parts
from data_prep.flow.streams import suffix_of
from smlp.errors import UserError

# what is looked for in folders; files that are named may have any suffix
SUFFIXES = {DOCUMENTS: FORMATS, LINES: (".txt",), PIECES: (".spm", ".bpe", ".txt")}


def parts_of_splits(args: argparse.Namespace) -> dict[str, list[Part]]:
    """The parts of each split that there is, named after it.

    Raises:
        UserError: a file is missing, or there is no split at all.
    """
    suffixes = SUFFIXES[args.format]
    splits: dict[str, list[Part]] = {}
    for split, inputs in _inputs(args, suffixes).items():
        parts = plan_parts(
            find_files(inputs, suffixes),
            args.part_bytes,
            cut_text=args.documents != "file",
            all_lines=args.format != DOCUMENTS,
        )
        splits[split] = [replace(part, name=f"{split}--{part.name}") for part in parts]
    return splits


def _inputs(args: argparse.Namespace, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    named = {split: getattr(args, split) for split in SPLITS if getattr(args, split)}
    if (args.sample is None) == (not named):
        raise UserError("name the text with --in DIR or with --train, --valid and --test, not both")
    if args.sample is None:
        return named
    found = {split: _of_split(args.sample, split, suffixes) for split in SPLITS}
    if not found["train"]:
        kinds = ", ".join(suffixes)
        raise UserError(f"--in {args.sample} holds no folder or file train with text (files end in {kinds})")
    return {split: inputs for split, inputs in found.items() if inputs}


def _of_split(sample: Path, split: str, suffixes: tuple[str, ...]) -> list[Path]:
    """A folder of that name with files in it, or else files of it."""
    if (sample / split).is_dir():
        return [sample / split] if _holds_files(sample / split, suffixes) else []
    return sorted(
        path
        for path in sample.glob(f"{split}.*")
        if path.is_file() and path.name.split(".")[0] == split and suffix_of(path) in suffixes
    )


def _holds_files(folder: Path, suffixes: tuple[str, ...]) -> bool:
    try:
        find_files([folder], suffixes)
    except UserError:
        return False
    return True
