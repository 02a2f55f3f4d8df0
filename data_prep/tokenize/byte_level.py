"""GPT-2's byte-level BPE: trained anew, or read from given files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from smlp.errors import UserError
from smlp.text.tokenizer_files import ENCODER_JSON, VOCAB_BPE, byte_characters, read_encoder, read_merges

NUM_BYTES = 256


def train_byte_level(lines: Iterable[str], vocab_size: int) -> dict[str, bytes]:
    """Trains on lines of text; returns the files by name. The same lines give the same bytes.

    Args:
        lines: of text, without line ends.
        vocab_size: pieces: 256 bytes and the merges. A text too small for it yields fewer merges.

    Raises:
        UserError: ``vocab_size`` is below 256, or the package ``tokenizers`` is not installed.
    """
    if vocab_size < NUM_BYTES:
        raise UserError(f"vocabulary size must be at least {NUM_BYTES} for byte-level BPE, not {vocab_size}")
    try:
        import tokenizers
    except ImportError:
        raise UserError("--kind gpt2 needs the package tokenizers: pip install 'smlp[data]'") from None
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(byte_characters()), special_tokens=[], show_progress=False
    )
    model.train_from_iterator(lines, trainer)
    trained = json.loads(model.to_str())["model"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in trained["merges"]]
    return _files(trained["vocab"], merges)


def given_byte_level(encoder_json: Path, vocab_bpe: Path) -> dict[str, bytes]:
    """The files of an encoding that exists, by name, as they are.

    Raises:
        UserError: one is missing, is not in GPT-2's format, or they do not fit each other.
    """
    ids, merges = read_encoder(encoder_json), read_merges(vocab_bpe)
    for pair in merges:
        unknown = [piece for piece in (*pair, "".join(pair)) if piece not in ids]
        if unknown:
            raise UserError(f"{vocab_bpe} merges {' and '.join(pair)}, but {encoder_json} has no piece {unknown[0]}")
    if sorted(ids.values()) != list(range(len(ids))):
        raise UserError(f"{encoder_json} has {len(ids)} pieces, but their ids are not 0 to {len(ids) - 1}")
    return {ENCODER_JSON: encoder_json.read_bytes(), VOCAB_BPE: vocab_bpe.read_bytes()}


def num_pieces(encoder: bytes) -> int:
    """Pieces in the content of an ``encoder.json``."""
    return len(json.loads(encoder))


def _files(ids: dict[str, int], merges: Iterable[Iterable[str]]) -> dict[str, bytes]:
    in_order = dict(sorted(ids.items(), key=lambda item: item[1]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    return {ENCODER_JSON: json.dumps(in_order).encode(), VOCAB_BPE: ("\n".join(lines) + "\n").encode()}
