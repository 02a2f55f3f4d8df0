"""``smlp data clean``: options, parts, manifest."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.clean.cleaner import RULES, Cleaning, clean, load
from data_prep.clean.filters import languages
from data_prep.flow.documents import ReadSettings, counted_records
from data_prep.flow.limits import CpuLimit, DocumentFailed
from data_prep.flow.manifest import Counts, PartResult, write_manifest
from data_prep.flow.options import (
    COMPRESSIONS,
    add_compression,
    add_input_options,
    add_number,
    add_run_options,
    add_time_option,
    input_settings,
    parts_of,
    reading_of,
    run_of,
)
from data_prep.flow.parts import FilePart
from data_prep.flow.running import Report, begin, run_parts
from data_prep.flow.streams import write_stream
from smlp.cli.numbers import MOST_BYTES, real, whole
from smlp.errors import UserError

DESCRIPTION = "Clean documents: characters, boilerplate, language, length and repetition; every rule is counted."
EPILOG = """example:
  smlp data clean --in corpora/ --out data/clean --workers 8
  smlp data clean --in books/ --out data/books --language any --without repeated-lines navigation

What the rules do and where their thresholds come from is in docs/data.md.
"""

#: fields set by options of the same name
_NUMBERS = [item for item in fields(Cleaning) if "help" in item.metadata]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Each threshold has one, named as in :class:`Cleaning`."""
    add_input_options(parser)
    add_time_option(parser)
    group = parser.add_argument_group("rules")
    group.add_argument("--without", nargs="+", default=[], choices=RULES, metavar="RULE", help=", ".join(RULES))
    group.add_argument(
        "--language",
        default=Cleaning.language,
        metavar="CODE",
        help="language of the documents to keep, or any (default: en)",
    )
    for item in _NUMBERS:
        add_number(
            group,
            f"--{item.name.replace('_', '-')}",
            _bounds(item.name, item.default),
            f"{item.metadata['help']} (default: {item.default:,})",
            item.default,
            metavar="N" if isinstance(item.default, int) else "X",
        )
    add_compression(parser)
    add_run_options(parser)


def _bounds(name: str, default: int | float) -> dict[str, Any]:
    """Return the bounds of a threshold: word lengths are means, all other fractional numbers are shares."""
    if isinstance(default, int):
        return whole(1 if name == "language_characters" else 0, MOST_BYTES)
    return real(0, float("inf") if name.endswith("word_length") else 1)


def settings_of(args: argparse.Namespace) -> Cleaning:
    """Return the rules that the options select.

    Raises:
        UserError: the language is not known, a lower limit is above the upper one, or an option's rule is left out.
    """
    off = {rule: f"--without {rule}" for rule in args.without}
    if args.language != "en":
        off.setdefault("stop-words", f"--language {args.language}")
    if args.language == "any":
        off.setdefault("language", "--language any")
    for item in _NUMBERS:
        value, rule = getattr(args, item.name), item.metadata["rule"]
        if rule in off and value != item.default:
            raise UserError(f"--{item.name.replace('_', '-')} {value} has no effect with {off[rule]}: leave one out")
    for name, rules in (("words", ("few-words", "many-words")), ("word_length", ("word-length",))):
        least, most = getattr(args, f"min_{name}"), getattr(args, f"max_{name}")
        if least > most and off.keys().isdisjoint(rules):
            option = name.replace("_", "-")
            raise UserError(f"--min-{option} {least} is above --max-{option} {most}: no document would be kept")
    if args.language != "any" and "language" not in args.without and args.language not in languages():
        raise UserError(f"--language {args.language!r} is unknown: choose any or one of {', '.join(languages())}")
    values = {item.name: getattr(args, item.name) for item in _NUMBERS}
    return Cleaning(off=frozenset(args.without), language=args.language, **values)


def clean_part(part: FilePart, out: Path, reading: ReadSettings, settings: Cleaning, suffix: str) -> PartResult:
    """Write the documents of a part that are kept, as ``NAME.jsonl`` with the suffix of a compression."""
    load(settings)  # else it would count as time of the first document
    counts, defects, limit = Counts(), [], CpuLimit(reading.max_seconds)
    with write_stream(out / f"{part.name}.jsonl{suffix}") as (stream, written):
        for piece in counted_records(part, reading, counts, defects):
            tally: Counter[str] = Counter()
            try:
                with limit:
                    text, reason = clean(piece.text, settings, tally)
            except DocumentFailed as error:
                reason, tally = str(error), Counter()  # partial counts would depend on the machine
                defects.append({"problem": f"dropped, {reason}", "where": piece.id})
            counts.other.update(tally)
            if reason:
                counts.drop(reason)
            else:
                counts.keep()
                stream.write(replace(piece, text=text).line())
                counts.other["characters kept"] += len(text)
            counts.other["characters in"] += len(piece.text)
    return PartResult([written.row(out, documents=counts.kept)], counts, defects)


def run(args: argparse.Namespace) -> int:
    """Clean all parts, and report how many documents were kept and dropped."""
    settings, reading, run = settings_of(args), reading_of(args), run_of(args)
    recorded = {
        **input_settings(args),
        "max_document_seconds": args.max_document_seconds,
        "compress": args.compress,
        "without": sorted(settings.off),
        "language": settings.language,
        **{item.name: getattr(args, item.name) for item in _NUMBERS},
    }
    parts = parts_of(args)
    begin(run, "clean", recorded, args.restart)
    work = partial(clean_part, reading=reading, settings=settings, suffix=COMPRESSIONS[args.compress])
    ending = Report("clean", run)
    done = run_parts(run, "clean", parts, work)
    if done.results is None:
        return ending.waiting(done, "the parts")
    return ending.finished(write_manifest(run.out, "clean", recorded, done.inputs, done.results))
