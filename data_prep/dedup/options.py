"""Options of ``smlp data dedup``."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_prep.dedup.contamination import MIN_NGRAM, NGRAM
from data_prep.flow.options import add_compression, add_input_options, add_run_options
from smlp.cli.numbers import real, whole

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
        "--threshold",
        **real(0.1, 1),
        default=0.8,
        metavar="X",
        help="Jaccard similarity of near duplicates (default: 0.8)",
    )
    group.add_argument(
        "--num-perm", **whole(16, 4096), default=128, metavar="N", help="entries of a signature (default: 128)"
    )
    group.add_argument("--ngram", **whole(), default=5, metavar="N", help="words of a run (default: 5)")
    group.add_argument(
        "--seed", **whole(0, (1 << 32) - 1), default=1, metavar="N", help="of the signatures (default: 1)"
    )
    group.add_argument(
        "--partitions",
        **whole(1, MAX_PARTITIONS),
        metavar="N",
        help="of the rows on disk, up to 4096 (default: one for each 64 MiB)",
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
        **whole(),
        default=NGRAM,
        metavar="N",
        help=f"words in a row that make an overlap; shorter texts count as a whole from {MIN_NGRAM} words on "
        f"(default: {NGRAM})",
    )
    add_compression(parser)
    add_run_options(parser)
