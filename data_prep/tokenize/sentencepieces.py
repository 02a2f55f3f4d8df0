"""SentencePiece models: unigram and BPE."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable

from smlp.errors import UserError

KINDS = ("unigram", "bpe")
SPECIAL_PIECES = 3  # that every model has: <unk>, <s>, </s>
MAX_LINE_BYTES = 1 << 16  # SentencePiece skips longer lines when it trains (it encodes them all the same)
NUM_THREADS = 4  # fixed: the model may depend on how the sums are shared out among threads


def train_sentencepiece(
    lines: Iterable[str], vocab_size: int, kind: str = "unigram", byte_fallback: bool = False
) -> bytes:
    """Trains on the non-empty lines; returns the serialised model. The same lines give the same bytes.

    Args:
        lines: of text; all characters of theirs get a piece.
        vocab_size: pieces, with three special ones. A text too small for it yields a smaller unigram model.
        kind: one of ``KINDS``.
        byte_fallback: whether what has no piece becomes pieces of bytes.

    Raises:
        UserError: ``vocab_size`` does not even hold the text's characters, is too large for BPE of this text, or there
            is no text.
    """
    import sentencepiece

    if vocab_size < 1:
        raise UserError(f"vocabulary size must be at least 1, not {vocab_size}")
    texts = _Texts(lines)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
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
        if not texts.number:
            raise UserError("the training text holds no line of text to build a vocabulary from") from error
        raise UserError(_explained(" ".join(str(error).split()), vocab_size)) from error
    return model.getvalue()


class _Texts:
    """Lines that are not empty, and how many there were."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines, self.number = lines, 0

    def __iter__(self) -> Iterable[str]:
        for line in self._lines:
            if line:
                self.number += 1
                yield line


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
    return f"vocabulary of size {vocab_size} cannot be trained: {message}"


def pieces_of(model: bytes) -> list[str]:
    """The pieces of a model in its order, without ``<unk>`` and control symbols, which a dictionary has of its own."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [
        processor.id_to_piece(number)
        for number in range(processor.get_piece_size())
        if not processor.is_unknown(number) and not processor.is_control(number)
    ]
