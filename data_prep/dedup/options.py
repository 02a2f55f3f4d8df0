"""Options of ``smlp data dedup``."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_prep.dedup.contamination import MIN_NGRAM, NGRAM
from data_prep.flow.options import add_compression, add_input_options, add_run_options
from smlp.errors import UserError

MAX_PARTITIONS = 4096  # a phase has a file for each, and reads a piece of every part for each


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options."""
    add_input_options(parser)
    group = parser.add_argument_group("duplicates")
    group.add_argument(
        "--held-out",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="documents of your own for validation or test: what repeats one of them is removed from --in",
    )
    group.add_argument("--no-near", dest="near", action="store_false", help="remove exact duplicates only: much faster")
    group.add_argument(
        "--threshold", type=float, default=0.8, metavar="X", help="Jaccard similarity of near duplicates (default: 0.8)"
    )
    group.add_argument("--num-perm", type=int, default=128, metavar="N", help="entries of a signature (default: 128)")
    group.add_argument("--ngram", type=int, default=5, metavar="N", help="words of a run (default: 5)")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="of the signatures (default: 1)")
    group.add_argument(
        "--partitions", type=int, metavar="N", help="of the rows on disk, up to 4096 (default: one for each 64 MiB)"
    )
    group = parser.add_argument_group("zero-shot tasks")
    group.add_argument(
        "--decontaminate", type=Path, metavar="DIR", help="compare with the tasks that 'smlp zeroshot --data-dir' reads"
    )
    group.add_argument(
        "--decontaminate-action",
        choices=("report", "remove"),
        default="report",
        help="count documents that overlap with a task, or remove them too (default: report)",
    )
    group.add_argument(
        "--decontaminate-splits",
        choices=("scoring", "all"),
        default="scoring",
        help="splits that are scored by default, or all that are there (default: scoring)",
    )
    group.add_argument(
        "--decontaminate-ngram",
        type=int,
        default=NGRAM,
        metavar="N",
        help=f"words in a row that make an overlap; shorter texts count as a whole from {MIN_NGRAM} words on "
        f"(default: {NGRAM})",
    )
    add_compression(parser)
    add_run_options(parser)


def check(args: argparse.Namespace) -> None:
    """Raises UserError if a number is out of its range."""
    if not 0.1 <= args.threshold <= 1:
        raise UserError(f"--threshold must be from 0.1 to 1, not {args.threshold}")
    if not 16 <= args.num_perm <= 4096:
        raise UserError(f"--num-perm must be from 16 to 4096, not {args.num_perm}")
    for name in ("ngram", "decontaminate_ngram"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if not 0 <= args.seed < 1 << 32:
        raise UserError(f"--seed must be from 0 to {(1 << 32) - 1}, not {args.seed}")
    if args.partitions is not None and not 1 <= args.partitions <= MAX_PARTITIONS:
        raise UserError(f"--partitions must be from 1 to {MAX_PARTITIONS}, not {args.partitions}")
