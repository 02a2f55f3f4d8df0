"""``smlp data sample``: its options, and the survey and the writing that it runs."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from data_prep.flow.manifest import counts_of, write_manifest
from data_prep.flow.options import (
    COMPRESSIONS,
    add_compression,
    add_input_options,
    add_number,
    add_run_options,
    input_settings,
    parts_of,
    reading_of,
    run_of,
    tokenizer_setting,
)
from data_prep.flow.running import Report, begin, run_parts
from data_prep.sample.plan import make_plan, write_part
from data_prep.sample.survey import UNITS, Measure, Survey, survey_part
from smlp.cli.numbers import real, whole
from smlp.errors import UserError

DESCRIPTION = """Draw a part of the documents by the hashes of their texts, mix sources by weights, and split them into
train, valid and test. The same document is drawn, or held out, whatever file it is in; a smaller fraction is a part of
a larger one; documents with the same text go to the same split."""
EPILOG = """examples:
  smlp data sample --in data/unique --out data/tenth --fraction 0.1
  smlp data sample --in data/unique --out data/mixed --budget 100M --unit words --weights wiki=3,books=1 --repeat
  smlp data sample --in data/unique --out data/100m --budget 100M --unit tokens --tokenizer data/tokenizer
"""
_SMALLEST_FRACTION = 2.0**-60  # of hashes of 64 bits
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the step."""
    add_input_options(parser)
    group = parser.add_argument_group("sample")
    add_number(
        group,
        "--fraction",
        real(_SMALLEST_FRACTION, 1),
        "share of the documents to draw (default: all)",
        1.0,
        metavar="F",
    )
    add_number(group, "--seed", whole(-(1 << 63), (1 << 63) - 1), "another seed draws other documents", 1)
    for split in ("valid", "test"):
        add_number(
            group,
            f"--{split}",
            real(0, 1, below=True),
            f"share of the documents for {split} (default: 0.001)",
            0.001,
            metavar="SHARE",
        )
    group.add_argument("--budget", type=_number, metavar="N", help="size of train: 250000, 500K, 100M, 1.5B")
    group.add_argument("--unit", choices=UNITS, default="words", help="unit of the budget (default: words)")
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder that 'smlp data tokenizer' wrote, to count tokens"
    )
    group.add_argument("--weights", type=_weights, metavar="SOURCE=W,...", help="weights of the sources in train")
    group.add_argument("--repeat", action="store_true", help="read a source again if it has too little")
    add_compression(group)
    add_run_options(parser)


#: settings that affect the plan but not the survey of the documents
_OF_THE_PLAN = ("fraction", "valid", "test", "budget", "weights", "repeat", "compress")


def run(args: argparse.Namespace) -> int:
    """Run the step; return the exit status."""
    _check(args)
    settings = {
        **input_settings(args),
        **{name: getattr(args, name) for name in (*_OF_THE_PLAN, "seed", "unit")},
        "tokenizer": tokenizer_setting(args.tokenizer) if args.tokenizer else None,
    }
    work, parts = run_of(args), parts_of(args)
    begin(work, "sample", settings, args.restart, until_written=_OF_THE_PLAN)
    common = {"reading": reading_of(args), "measure": Measure(args.unit, args.tokenizer), "seed": args.seed}
    done = Report("sample", work)
    surveyed = run_parts(work, "survey", parts, partial(survey_part, **common))
    if surveyed.results is None:
        return done.waiting(surveyed, "the survey")
    counts = counts_of(surveyed.results)
    if not counts.kept:
        raise UserError(f"{', '.join(map(str, args.inputs))}: no documents{counts.reasons()}")
    survey = Survey(args.out, surveyed.results)
    plan = make_plan(survey, args.fraction, args.valid, args.test, args.budget, args.weights, args.repeat, args.unit)
    order = {part.name: index for index, part in enumerate(parts)}
    writing = partial(write_part, **common, plan=plan, order=order, suffix=COMPRESSIONS[args.compress])
    written = run_parts(work, "write", parts, writing, depends=plan, follows="survey")
    if written.results is None:
        return done.waiting(written, "the writing")
    sources = {
        source: {"available": quota.available, "wanted": quota.wanted, "whole_passes": quota.passes}
        for source, quota in plan.quotas.items()
    }
    facts = {"sources": sources, "unit": args.unit}
    manifest = write_manifest(
        args.out, "sample", settings, written.inputs, written.results, facts, versions=work.versions
    )
    return done.finished(manifest)


def _check(args: argparse.Namespace) -> None:
    if args.unit == "tokens" and args.tokenizer is None:
        raise UserError("--unit tokens needs --tokenizer, a folder that 'smlp data tokenizer' wrote")
    if args.repeat and args.budget is None:
        raise UserError("--repeat has no effect without --budget, the size up to which sources are read again")
    if args.tokenizer is not None and not args.tokenizer.is_dir():
        raise UserError(f"--tokenizer {args.tokenizer}: there is no such folder")
    if args.tokenizer is not None and args.unit != "tokens":
        raise UserError(f"--tokenizer has no effect with --unit {args.unit}: add --unit tokens, or leave it out")


def _number(text: str) -> int:
    scale = _SUFFIXES.get(text[-1:].upper(), 1)
    try:
        number = round(float(text[:-1] if scale > 1 else text) * scale)
    except (ValueError, OverflowError):
        number = 0
    if not 1 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 250000, 500K, 100M or 1.5B")
    return number


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in text.split(","):
        source, equals, value = item.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = -1.0
        if not (equals and source and 0 <= weight < float("inf")):
            raise argparse.ArgumentTypeError(f"{item!r} is not SOURCE=WEIGHT with a weight of 0 or more")
        if source in weights:
            raise argparse.ArgumentTypeError(f"source {source} is named twice")
        weights[source] = weight
    if not any(weights.values()):
        raise argparse.ArgumentTypeError("all weights are 0")
    return weights
