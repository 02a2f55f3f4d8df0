"""SentencePiece vocabulary of a corpus: ``python -m data_prep.tokenizer --in DIR --out DIR --vocab-size 8000``.

Trains a unigram model on ``train.txt`` alone and writes ``train.spm``, ``valid.spm`` and ``test.spm``: the same lines
as pieces with spaces between them, as ``fairseq-preprocess --only-source`` reads them, beside ``sentencepiece.model``.
"""

from __future__ import annotations

import argparse
import io
import re
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from data_prep.command import run
from data_prep.corpus import SPLITS, write_whole
from smlp.errors import UserError

MODEL_NAME = "sentencepiece.model"
DEFAULT_VOCAB_SIZE = 8000
MAX_TRAINING_LINES = 200_000  # a sample of longer corpora: more lines change the pieces little and take long
MAX_LINE_BYTES = 1 << 16  # SentencePiece skips longer lines when it trains (it encodes them all the same)
NUM_THREADS = 2  # fixed: the model may depend on how the sums are shared out among threads


@dataclass(frozen=True)
class TokenizedCorpus:
    """What :func:`tokenize` did: asked-for and actual vocabulary, and pieces (without line ends) of each split."""

    requested_size: int
    vocab_size: int
    num_pieces: dict[str, int]


def train_model(lines: list[str], vocab_size: int) -> bytes:
    """Trains on the non-empty lines; returns the serialised model. The same lines give the same bytes.

    A text too small for ``vocab_size`` pieces yields a smaller vocabulary. Raises UserError when ``vocab_size`` does
    not even hold the text's characters, or there is no text.
    """
    texts = [line for line in lines if line]
    if not texts:
        raise UserError("the training text holds no line of text to build a vocabulary from")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            input_sentence_size=MAX_TRAINING_LINES,
            shuffle_input_sentence=len(texts) > MAX_TRAINING_LINES,
            max_sentence_length=MAX_LINE_BYTES,
            num_threads=NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        message = str(error)
        too_small = re.search(r"required_chars\. (\d+) vs (\d+)", message)
        if too_small:
            raise UserError(
                f"vocabulary size {vocab_size} is too small: the training text has {too_small.group(2)} "
                "different characters and marks"
            ) from error
        raise UserError(f"vocabulary of size {vocab_size} cannot be trained: {' '.join(message.split())}") from error
    return model.getvalue()


def tokenize(source: Path, out: Path, vocab_size: int = DEFAULT_VOCAB_SIZE) -> TokenizedCorpus:
    """Trains on ``source/train.txt``, encodes all splits of ``source`` into ``out``, the model beside them.

    Raises UserError if a split is missing or a setting does not fit the text.
    """
    if vocab_size < 1:
        raise UserError(f"vocabulary size must be at least 1, not {vocab_size}")
    lines = {name: _read_lines(source / f"{name}.txt") for name in SPLITS}
    model = train_model(lines["train"], vocab_size)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    out.mkdir(parents=True, exist_ok=True)
    num_pieces = {}
    for name in SPLITS:
        pieces = processor.encode(lines[name], out_type=str, num_threads=NUM_THREADS)
        num_pieces[name] = sum(map(len, pieces))
        write_whole(out / f"{name}.spm", "".join(" ".join(line) + "\n" for line in pieces).encode())
    write_whole(out / MODEL_NAME, model)  # last: its presence says that the splits are complete
    return TokenizedCorpus(vocab_size, processor.get_piece_size(), num_pieces)


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"split {path} is missing: build the corpus first") from error
    except UnicodeDecodeError as error:
        raise UserError(f"split {path} is not UTF-8 at byte offset {error.start}") from error
    return text.removesuffix("\n").split("\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.tokenizer",
        description="Train a SentencePiece vocabulary on train.txt and split all texts into its pieces.",
        epilog="example: python -m data_prep.tokenizer --in data/mine --out data/mine-spm --vocab-size 8000",
    )
    parser.add_argument("--in", dest="source", type=Path, required=True, metavar="DIR", help="train/valid/test.txt")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where pieces and model go")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, metavar="N", help="pieces at most")
    options = parser.parse_args(arguments)
    result = tokenize(options.source, options.out, options.vocab_size)
    if result.vocab_size < result.requested_size:
        print(f"the text is too small for {result.requested_size} pieces: the vocabulary has {result.vocab_size}")
    counts = ", ".join(f"{name} {count:,}" for name, count in result.num_pieces.items())
    print(f"wrote {options.out}: vocabulary of {result.vocab_size} pieces; pieces without line ends: {counts}")


if __name__ == "__main__":
    raise SystemExit(run(main))
