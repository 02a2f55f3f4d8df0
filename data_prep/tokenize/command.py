"""``smlp data tokenizer``: its options, and the dictionary, model and manifest that it writes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.flow.manifest import MANIFEST, Counts, PartResult, counts_of, is_whole, read_manifest, write_manifest
from data_prep.flow.options import (
    add_input_options,
    add_number,
    add_run_options,
    input_settings,
    parts_of,
    reading_of,
    run_of,
)
from data_prep.flow.running import Report, begin, locked, note_files, run_parts
from data_prep.flow.streams import sha256_of, write_bytes
from data_prep.tokenize.measuring import check_lossless, count_pieces, round_trip
from data_prep.tokenize.models import (
    KINDS,
    SPECIAL_PIECES,
    given_byte_level,
    padding_of,
    pieces_of,
    train_byte_level,
    train_sentencepiece,
)
from data_prep.tokenize.sampling import Sample, leave_out, sample_part
from smlp.cli.numbers import MOST_BYTES, MOST_SEED, MOST_SIZE, whole
from smlp.errors import UserError
from smlp.text.tokenizer import Tokenizer, Vocabulary
from smlp.text.tokenizer_files import DICTIONARY, ENCODER_JSON, SENTENCEPIECE_MODEL, SPECIAL_SYMBOLS, find_tokenizer

GPT2 = "gpt2"
SAMPLE_BYTES = 50_000_000
DESCRIPTION = """make a vocabulary of the training text: a SentencePiece model or byte-level BPE, and fairseq's dict.txt

Learns from a sample of the documents, drawn by their hashes. Writes sentencepiece.model, or encoder.json and vocab.bpe
as fairseq's --bpe gpt2 reads them, and dict.txt with every piece of the model; manifest.json says how many tokens a
word takes, what is unknown and whether text comes back as it was."""
EPILOG = """examples:
  smlp data tokenizer --in data/sample/train --out data/tokenizer --vocab-size 32000
  smlp data tokenizer --in data/sample/train --out data/tokenizer --kind gpt2 --pad-to 51200 \\
      --encoder-json encoder.json --vocab-bpe vocab.bpe
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the step."""
    add_input_options(parser)
    group = parser.add_argument_group("vocabulary")
    group.add_argument(
        "--kind",
        choices=(*KINDS, GPT2),
        default="unigram",
        help="SentencePiece unigram or BPE, or GPT-2's byte-level BPE (default: unigram)",
    )
    add_number(
        group, "--vocab-size", whole(1, MOST_SIZE), "pieces without those of --pad-to (default: 32000, 50257 for gpt2)"
    )
    group.add_argument(
        "--byte-fallback",
        action="store_true",
        help="SentencePiece: encode characters without a piece as bytes, so that nothing is unknown",
    )
    group.add_argument(
        "--encoder-json", type=Path, metavar="FILE", help="gpt2: use this and --vocab-bpe, and train nothing"
    )
    group.add_argument("--vocab-bpe", type=Path, metavar="FILE", help="gpt2: the merges of --encoder-json")
    padding = group.add_mutually_exclusive_group()
    add_number(padding, "--pad-to", whole(1, MOST_SIZE), "fill dict.txt up to N symbols, special ones included")
    add_number(padding, "--pad-multiple", whole(1, MOST_SIZE), "fill it up to a multiple of N", 1)
    add_number(
        group, "--sample-bytes", whole(1, MOST_BYTES), f"bytes of text to learn from ({SAMPLE_BYTES:,})", SAMPLE_BYTES
    )
    add_number(group, "--seed", whole(0, MOST_SEED), "seed of the sample (default: 1)", 1)
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    """Draw the sample, train, measure, write; return the exit status."""
    _check(args)
    given = given_byte_level(args.encoder_json, args.vocab_bpe) if args.encoder_json else None
    parts, run = parts_of(args), run_of(args)
    settings = _settings(args)
    begin(run, "tokenizer", settings, args.restart)
    total = sum(part.num_bytes for part in parts)
    end = Report("tokenizer", run)
    work = partial(
        sample_part, reading=reading_of(args), num_bytes=args.sample_bytes, total=max(total, 1), seed=args.seed
    )
    done = run_parts(run, "draw", parts, work, depends=total)  # which decides the share of each part
    if done.results is None:
        return end.waiting(done, "the sample")
    if not is_whole(run.out, done.inputs, settings):
        with locked(run):
            files = [run.out / output["name"] for result in done.results for output in result.outputs]
            sample, counts = Sample.of(files, args.sample_bytes), counts_of(done.results)
            leave_out(counts, sample.num_drawn - len(sample.numbers))
            if not run.quiet and given is None:
                print("learning from the sample ...", file=sys.stderr)
            outputs, facts = _write(run.out, args, given, sample, counts)
            results = [PartResult(outputs, Counts()), *(replace(result, outputs=[]) for result in done.results)]
            write_manifest(run.out, "tokenizer", settings, done.inputs, results, facts, counts)
    manifest = read_manifest(run.out, "tokenizer")
    return end.finished(manifest, *_lines(manifest))


def _check(args: argparse.Namespace) -> None:
    given = args.encoder_json, args.vocab_bpe
    if any(given) and (args.kind != GPT2 or not all(given)):
        raise UserError("--encoder-json and --vocab-bpe must be given together, with --kind gpt2")
    if all(given) and args.vocab_size is not None:
        raise UserError("--vocab-size is for training a vocabulary: --encoder-json has a fixed size")
    if args.byte_fallback and args.kind == GPT2:
        raise UserError("--byte-fallback is for SentencePiece: --kind gpt2 encodes bytes anyway")


def _asked_for(args: argparse.Namespace) -> int | None:
    """Return the number of pieces to learn, those that every model has included; None if nothing is learnt."""
    if args.encoder_json:
        return None
    return args.vocab_size or (50257 if args.kind == GPT2 else 32000)


def _trained(args: argparse.Namespace, lines: Iterator[str]) -> dict[str, bytes]:
    """Return the files, by name, of a tokenizer that has learnt from lines."""
    size = _asked_for(args)
    if args.kind == GPT2:
        return train_byte_level(lines, size)
    return {SENTENCEPIECE_MODEL: train_sentencepiece(lines, size, args.kind, args.byte_fallback)}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("kind", "vocab_size", "byte_fallback", "pad_to", "pad_multiple", "sample_bytes", "seed")
    given = {
        name: {"path": str(path), "sha256": sha256_of(path)}
        for name in ("encoder_json", "vocab_bpe")
        if (path := getattr(args, name)) is not None
    }
    return {**input_settings(args), **{name: getattr(args, name) for name in names}, **given}


def _write(
    out: Path, args: argparse.Namespace, given: dict[str, bytes] | None, sample: Sample, counts: Counts
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train if no files are given, write the files and measure; return what was written, and facts for the manifest."""
    (out / MANIFEST).unlink(missing_ok=True)
    if next(sample.lines(), None) is None:
        names = ", ".join(map(str, args.inputs))
        raise UserError(f"{names}: no line of text to build a vocabulary from{counts.reasons()}")
    files = given or _trained(args, sample.lines())
    if ENCODER_JSON in files:  # dict.txt has the ids as symbols
        symbols = [str(number) for number in range(len(json.loads(files[ENCODER_JSON])))]
    else:
        symbols = pieces_of(files[SENTENCEPIECE_MODEL])
    padding = padding_of(len(SPECIAL_SYMBOLS) + len(symbols), args.pad_to, args.pad_multiple)
    note_files(out, [*files, DICTIONARY])
    (out / DICTIONARY).unlink(missing_ok=True)  # an earlier model's, which would lie beside this one
    outputs = [write_bytes(out / name, content) for name, content in files.items()]
    vocabulary = Vocabulary([*symbols, *padding])
    tokenizer = Tokenizer(vocabulary, find_tokenizer([out]))
    if args.kind == GPT2:
        check_lossless(tokenizer)
    frequency_V, measured = count_pieces(sample.lines(), tokenizer)
    rows = zip([*symbols, *padding], frequency_V[len(SPECIAL_SYMBOLS) :].tolist(), strict=True)
    content = "".join(f"{symbol} {count}\n" for symbol, count in rows)
    outputs.append(write_bytes(out / DICTIONARY, content.encode()))
    facts = {
        "vocabulary": {
            "symbols": len(vocabulary),
            "special": list(SPECIAL_SYMBOLS),
            "asked_for": _asked_for(args),
            "pieces": len(symbols),
            "padding": len(padding),
            "never_seen": int((frequency_V[len(SPECIAL_SYMBOLS) :][: len(symbols)] == 0).sum()),
        },
        "sample": measured,
        "round_trip": round_trip(sample.lines(), tokenizer),
    }
    return outputs, facts


def _lines(manifest: dict[str, Any]) -> list[str]:
    """Return lines for the terminal."""
    vocabulary, sample, back = manifest["vocabulary"], manifest["sample"], manifest["round_trip"]
    lines = [
        f"dictionary: {vocabulary['symbols']:,} symbols: {len(vocabulary['special'])} special, "
        f"{vocabulary['pieces']:,} pieces ({vocabulary['never_seen']:,} not seen in the sample), "
        f"{vocabulary['padding']:,} to fill it",
        f"sample: {sample['bytes']:,} bytes, {sample['words']:,} words, {sample['tokens']:,} tokens: "
        f"{sample['tokens_per_word']:.3f} a word, {sample['bytes_per_token']:.2f} bytes each, "
        f"{sample['unknown_share']:.4%} unknown",
        f"round trip of {back['lines']:,} lines: {back['same']:,} come back as they were, "
        f"{back['with_unknown_pieces']:,} have unknown pieces, {back['changed_by_normalisation']:,} are changed",
    ]
    special = 0 if manifest["settings"]["kind"] == GPT2 else SPECIAL_PIECES
    if vocabulary["pieces"] < (vocabulary["asked_for"] or 0) - special:
        lines.append(f"the text is too small for {vocabulary['asked_for']:,} pieces")
    return lines + [f"  {change['was']!r} becomes {change['becomes']!r}" for change in back["examples"][:2]]
