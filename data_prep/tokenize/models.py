"""Train SentencePiece models and GPT-2's byte-level BPE, or take given files; fill up their dictionary."""

from __future__ import annotations

import io
import itertools
import json
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from smlp.errors import UserError
from smlp.files import read_bytes
from smlp.text.tokenizer_files import (
    ENCODER_JSON,
    FILLER,
    SPECIAL_SYMBOLS,
    VOCAB_BPE,
    byte_characters,
    read_byte_level,
)

KINDS = ("unigram", "bpe")
SPECIAL_PIECES = 3  # that every model has: <unk>, <s>, </s>
MAX_LINE_BYTES = 1 << 16  # SentencePiece skips longer lines when it trains (it encodes them all the same)
NUM_THREADS = 4  # fixed: the model may depend on how the sums are shared out among threads
NUM_BYTES = 256


def train_sentencepiece(
    lines: Iterable[str], vocab_size: int, kind: str = "unigram", byte_fallback: bool = False
) -> bytes:
    """Train on the non-empty lines; return the serialised model. The same lines give the same bytes.

    Args:
        lines: of text. Each of their characters, normalised, gets a piece, except NUL and those that are only in
            ``<s>``, ``</s>``, ``<unk>``, a line with U+2585 or one longer than ``MAX_LINE_BYTES``.
        vocab_size: pieces, with three special ones. A text too small for it yields a smaller unigram model.
        kind: one of ``KINDS``.
        byte_fallback: encode what has no piece as bytes.

    Raises:
        UserError: ``vocab_size`` does not even hold the text's characters, is too large for BPE of this text, or there
            is no text.
    """
    import sentencepiece

    if vocab_size < 1:
        raise UserError(f"vocabulary size must be at least 1, not {vocab_size}")
    failed: list[UserError] = []  # SentencePiece would put Python's stack into its message

    def watched() -> Iterator[str]:
        try:
            yield from filter(None, lines)
        except UserError as error:
            failed.append(error)
            raise

    texts = watched()
    first = next(texts, None)
    if first is None:
        raise UserError("the training text holds no line of text to build a vocabulary from")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain([first], texts),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            max_sentence_length=MAX_LINE_BYTES,
            byte_fallback=byte_fallback,
            num_threads=NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if failed:
            raise failed[0] from None
        raise UserError(_explained(" ".join(str(error).split()), vocab_size)) from error
    return with_exact_sums(model.getvalue()) if kind == "unigram" else model.getvalue()


def with_exact_sums(model: bytes) -> bytes:
    """Return a unigram model whose log-probabilities are multiples of 2**-9.

    Their sums are exact in float32 then, so that two orders of the same pieces (``...`` and ``.``) are equally likely
    in every implementation. Otherwise rounding decides, and Hugging Face's tokenizers round otherwise.
    """
    rounded, end = bytearray(model), 0
    while end < len(model):  # the fields of a ModelProto, all of them messages
        tag, end = _varint(model, end)
        length, at = _varint(model, end)
        end = at + length
        while tag >> 3 == 1 and at < end:  # a piece: its text, its log-probability, its type
            tag_within, at = _varint(model, at)
            if tag_within & 7 == 5:
                (score,) = struct.unpack_from("<f", model, at)
                struct.pack_into("<f", rounded, at, round(score * 2**9) / 2**9)
                at += 4
            else:
                value, at = _varint(model, at)
                at += value if tag_within & 7 == 2 else 0
    return bytes(rounded)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a byte, in groups of seven bits, and where it ends."""
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _explained(message: str, vocab_size: int) -> str:
    too_small = re.search(r"required_chars\. (\d+) vs (\d+)", message)
    if too_small:
        return (
            f"vocabulary size {vocab_size} is too small: the training text has {too_small.group(2)} different "
            "characters and marks"
        )
    too_large = re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", message)
    if too_large:
        return f"vocabulary size {vocab_size} is too large: the training text has only {too_large.group(1)} pieces"
    if "sentences_.empty()" in message:  # SentencePiece leaves out longer lines
        return "there is nothing to train on: every paragraph of the text is empty or above 65,536 bytes"
    return f"vocabulary of size {vocab_size} cannot be trained: {message}"


def pieces_of(model: bytes) -> list[str]:
    """Return the pieces of a model in its order, without ``<unk>`` and control symbols, which every dictionary has."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [
        processor.id_to_piece(number)
        for number in range(processor.get_piece_size())
        if not processor.is_unknown(number) and not processor.is_control(number)
    ]


def train_byte_level(lines: Iterable[str], vocab_size: int) -> dict[str, bytes]:
    """Train on lines of text; return the files by name. The same lines give the same bytes.

    ``vocab_size`` counts the 256 bytes and the merges; a text too small for it yields fewer merges.

    Raises:
        UserError: ``vocab_size`` is below 256, or the package ``tokenizers`` is not installed.
    """
    if vocab_size < NUM_BYTES:
        raise UserError(f"vocabulary size must be at least {NUM_BYTES} for byte-level BPE, not {vocab_size}")
    try:
        import tokenizers
    except ImportError:
        raise UserError("--kind gpt2 needs the package tokenizers: pip install -e '.[data]'") from None
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(byte_characters()), special_tokens=[], show_progress=False
    )
    model.train_from_iterator(lines, trainer)
    trained = json.loads(model.to_str())["model"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in trained["merges"]]
    ids = dict(sorted(trained["vocab"].items(), key=lambda item: item[1]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    return {ENCODER_JSON: json.dumps(ids).encode(), VOCAB_BPE: ("\n".join(lines) + "\n").encode()}


def given_byte_level(encoder_json: Path, vocab_bpe: Path) -> dict[str, bytes]:
    """Return the files of an existing encoding, by name, as they are, but for a line end after the last merge.

    Raises:
        UserError: one is missing, is not in GPT-2's format, or they do not fit each other.
    """
    ids, _ = read_byte_level(encoder_json, vocab_bpe)
    if sorted(ids.values()) != list(range(len(ids))):
        raise UserError(f"{encoder_json} has {len(ids)} pieces, but their ids are not 0 to {len(ids) - 1}")
    merges = read_bytes(vocab_bpe)
    # fairseq leaves out what stands after the last line end
    return {ENCODER_JSON: read_bytes(encoder_json), VOCAB_BPE: merges if merges.endswith(b"\n") else merges + b"\n"}


def padding_of(num_symbols: int, pad_to: int | None, pad_multiple: int) -> list[str]:
    """Return the symbols that fill a dictionary up to ``pad_to``, or to a multiple of ``pad_multiple`` if it is None.

    ``num_symbols`` includes fairseq's four special ones.

    Raises:
        UserError: it is larger than ``pad_to``.
    """
    size = -(-num_symbols // pad_multiple) * pad_multiple if pad_to is None else pad_to
    if size < num_symbols:
        special = len(SPECIAL_SYMBOLS)
        raise UserError(
            f"--pad-to {size} is less than the {num_symbols} symbols of the dictionary: {num_symbols - special} pieces "
            f"and {special} special ones"
        )
    return [f"{FILLER}{number:04d}" for number in range(size - num_symbols)]
