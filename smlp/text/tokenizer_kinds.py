"""Split text at spaces, with SentencePiece or with byte-level BPE, into ids of a fairseq dictionary.

Letters: ``N`` tokens, ``L`` lines, ``O`` the tokenizer's own ids.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from smlp.errors import UserError
from smlp.files import regular_file
from smlp.text.tokenizer_files import (
    ENCODER_JSON,
    FILLER,
    SENTENCEPIECE_MODEL,
    Vocabulary,
    byte_characters,
    read_byte_level,
)

WORD_START = "\u2581"
STRETCH = 1 << 19  # characters, with a line break for each line, that are encoded at a time
_BEFORE_WORD = re.compile(r"\S \S")


class Kind(Protocol):
    """Converts text to ids of a dictionary and ids to bytes of text; unknown pieces become ``<unk>``."""

    #: whether a line's first piece begins with a space of its own, so that decoded lines are stripped
    strips_lines: bool

    def encode(self, line: str) -> list[int]:
        """Return the ids of a line without its end."""
        ...

    def encode_batch(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids of some lines joined, (N,) int64, and the number of ids of each line, (L,) int64."""
        ...

    def encode_with_offsets(self, line: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a line, and where the characters of each token begin and end in it."""
        ...

    def content(self, symbol: str) -> bytes:
        """Return the bytes that a symbol of the dictionary stands for within a line."""
        ...


class Words:
    """Splits text at white space, as ``fairseq-preprocess`` does."""

    strips_lines = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._index = _Index(vocabulary.index, vocabulary.unk)

    def encode(self, line: str) -> list[int]:
        return [self._index[word] for word in line.split()]

    def encode_batch(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _joined(self._index.__getitem__, [line.split() for line in lines])

    def encode_with_offsets(self, line: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self.encode(line), [match.span() for match in re.finditer(r"\S+", line)]

    def content(self, symbol: str) -> bytes:
        return f" {symbol}".encode()


class SentencePieces:
    """Splits text into the pieces of a SentencePiece model.

    Raises:
        UserError: there is no such file, or it is no model.
    """

    strips_lines = True

    def __init__(self, vocabulary: Vocabulary, model: Path) -> None:
        import sentencepiece

        regular_file(model, "SentencePiece model")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(model))
        except (RuntimeError, OSError) as error:
            raise UserError(f"{model} is not a SentencePiece model ({error})") from None
        pieces = [self._model.id_to_piece(number) for number in range(self._model.get_piece_size())]
        self._id_O = [vocabulary.index.get(piece, vocabulary.unk) for piece in pieces]
        self._id_O[self._model.unk_id()] = vocabulary.unk
        self.num_known = sum(number > vocabulary.unk for number in self._id_O)
        is_byte = self._model.is_byte
        self._bytes = {piece: bytes([int(piece[1:-1], 16)]) for number, piece in enumerate(pieces) if is_byte(number)}

    def encode(self, line: str) -> list[int]:
        return [self._id_O[number] for number in self._model.encode(line, out_type=int)]

    def encode_batch(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _joined(self._id_O.__getitem__, self._model.encode(list(lines), out_type=int, num_threads=1))

    def encode_with_offsets(self, line: str) -> tuple[list[int], list[tuple[int, int]]]:
        if hasattr(self._model, "encode_as_offset_mapping"):  # of sentencepiece 0.2.2 or newer, which lacks the other
            found = self._model.encode(line, return_type="offset_mapping")
            numbers, offsets = found["ids"], list(found["offsets"])
        else:
            pieces = self._model.encode(line, out_type="immutable_proto").pieces
            numbers, offsets = [piece.id for piece in pieces], [(piece.begin, piece.end) for piece in pieces]
        for place in reversed(range(len(offsets) - 1)):  # of the pieces of one character, only the last one has it
            (begin, end), (later, its_end) = offsets[place : place + 2]
            is_space = not self._model.id_to_piece(numbers[place]).replace(WORD_START, " ").strip()
            if end == later and not is_space and not line[begin:end].strip():
                offsets[place] = begin, its_end
        return [self._id_O[number] for number in numbers], offsets

    def content(self, symbol: str) -> bytes:
        return self._bytes.get(symbol) or symbol.replace(WORD_START, " ").encode()


class ByteLevelBPE:
    """Splits the bytes of a text with GPT-2's byte-pair encoding; its ids in decimal are the dictionary's symbols.

    Args:
        vocabulary: of the model.
        encoder_json: file of pieces with their ids, in GPT-2's alphabet for bytes. The merges are in ``vocab.bpe``
            next to it: a comment, then a pair on each line.

    Raises:
        UserError: a file is missing or is not in this format, or the package ``tokenizers`` is not installed.
    """

    strips_lines = False

    def __init__(self, vocabulary: Vocabulary, encoder_json: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UserError(
                f"{encoder_json}: byte-level BPE needs the package tokenizers: pip install -e '.[data]'"
            ) from None
        ids, merges = read_byte_level(encoder_json)
        self._model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
        self._model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._id_O = [vocabulary.unk] * (max(ids.values(), default=0) + 1)
        for number in ids.values():
            self._id_O[number] = vocabulary.index.get(str(number), vocabulary.unk)
        self.num_known = sum(number > vocabulary.unk for number in self._id_O)
        byte_of = byte_characters()
        self._bytes = {
            str(number): bytes(byte_of[character] for character in piece)
            if all(character in byte_of for character in piece)
            else piece.encode()
            for piece, number in ids.items()
        }

    def encode(self, line: str) -> list[int]:
        return [self._id_O[number] for number in self._model.encode(line, add_special_tokens=False).ids]

    def encode_batch(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        stretches = [_stretches(line) for line in lines]
        ids, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        # the library takes a hundred bytes for each token
        for some in batches_of_text(itertools.chain.from_iterable(stretches), STRETCH):
            encoded = self._model.encode_batch_fast(some, add_special_tokens=False)
            ids_N, lengths_S = _joined(self._id_O.__getitem__, [stretch.ids for stretch in encoded])
            ids.append(ids_N)
            lengths.append(lengths_S)
        first_L = np.cumsum([0, *map(len, stretches)])[:-1]
        lengths_L = np.add.reduceat(np.concatenate(lengths), first_L) if len(lines) else np.empty(0, np.int64)
        return np.concatenate(ids), lengths_L

    def encode_with_offsets(self, line: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._model.encode(line, add_special_tokens=False)
        return [self._id_O[number] for number in encoded.ids], encoded.offsets

    def content(self, symbol: str) -> bytes:
        return self._bytes.get(symbol) or symbol.encode()


def kind_of(vocabulary: Vocabulary, model: str | Path | None) -> Kind:
    """Return the kind of tokenizer that a dictionary and a model need.

    Args:
        vocabulary: of the model.
        model: a SentencePiece model; ``encoder.json`` or another ``.json``, with ``vocab.bpe`` next to it; None for
            words between spaces.

    Raises:
        UserError: a file is missing or damaged, or none is given although the symbols are pieces.
    """
    if model is not None:
        kind = (ByteLevelBPE if Path(model).suffix == ".json" else SentencePieces)(vocabulary, Path(model))
        if kind.num_known == 0:
            raise UserError(f"no piece of {model} is in the dictionary of {len(vocabulary)} symbols: they do not match")
        return kind
    missing = ""
    numbers = sum(symbol.isdecimal() for symbol in vocabulary.symbols)
    # fillers of a padded dictionary do not count; byte-level BPE has an id for each byte
    fillers = sum(symbol.startswith(FILLER) for symbol in vocabulary.symbols) if numbers >= 256 else 0
    if any(symbol.startswith(WORD_START) for symbol in vocabulary.symbols):
        missing = f"SentencePiece pieces but there is no {SENTENCEPIECE_MODEL}"
    elif 2 * numbers > len(vocabulary) - fillers:
        missing = f"ids of byte-level BPE but there is no {ENCODER_JSON}"
    if missing:
        raise UserError(
            f"the dictionary holds {missing} beside it, beside the checkpoint or with the data: copy it there, or "
            "name it with --tokenizer"
        )
    return Words(vocabulary)


class _Index(dict):
    """Ids by symbol, with one id for all unknown symbols."""

    def __init__(self, index: dict[str, int], unknown: int) -> None:
        super().__init__(index)
        self._unknown = unknown

    def __missing__(self, symbol: str) -> int:
        return self._unknown


def _stretches(line: str) -> list[str]:
    """Split a long line where GPT-2's encoding always splits it: before a single space between other characters."""
    if len(line) <= STRETCH:
        return [line]
    places = [0]
    while match := _BEFORE_WORD.search(line, places[-1] + STRETCH):
        places.append(match.start() + 1)
    return [line[start:stop] for start, stop in itertools.pairwise([*places, len(line)])]


def batches_of_text(texts: Iterable[str], num_characters: int) -> Iterator[list[str]]:
    """Yield texts in lists of about ``num_characters``, of which each has one more than its own."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1
        if size >= num_characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _joined(id_of: object, rows: Iterable[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    lengths_L = np.fromiter(map(len, rows), np.int64, len(rows))
    ids_N = np.fromiter(map(id_of, itertools.chain.from_iterable(rows)), np.int64, int(lengths_L.sum()))
    return ids_N, lengths_L
