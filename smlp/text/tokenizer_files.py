"""Find and read the files of tokenizers: dictionaries and byte-level BPE.

A line of a fairseq dictionary is a ``symbol count`` pair; the four special symbols come before the first line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smlp.errors import UserError
from smlp.files import read_text

DICTIONARY = "dict.txt"
#: folder of the first sentences, and of the dictionary, in the data of fairseq's sentence_prediction
SENTENCES = "input0"
SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # in every dictionary, before the entries of its file
MASK = "<mask>"  # stands for a token that a masked language model restores
FILLER = "madeupword"  # fairseq's symbols that only fill a dictionary begin so
SENTENCEPIECE_MODEL = "sentencepiece.model"
ENCODER_JSON, VOCAB_BPE = "encoder.json", "vocab.bpe"
#: all files of a tokenizer, by the file that identifies it
TOKENIZERS = {SENTENCEPIECE_MODEL: (SENTENCEPIECE_MODEL,), ENCODER_JSON: (ENCODER_JSON, VOCAB_BPE)}
TOKENIZER_FILES = tuple(name for names in TOKENIZERS.values() for name in names)


#: in the ``extra_state`` of a checkpoint: :func:`record_of` its dictionary
RECORD = "dictionary"
_MOST_ADDED = 8  # pieces that no merge forms, besides those such as <|endoftext|>; there may also be 1 % of them
_LARGEST_ID = (1 << 24) - 1  # of a piece; a table of all ids is held in memory
_OVERWRITE = " #fairseq:overwrite"  # fairseq's flag for a symbol that may stand twice


class Vocabulary:
    """Symbols and their ids, as in fairseq's ``dict.txt``."""

    bos, pad, eos, unk = range(4)

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = [*SPECIAL_SYMBOLS, *symbols]
        self.index = {symbol: position for position, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    def with_mask(self) -> Vocabulary:
        """Return the vocabulary of a masked language model: with ``<mask>`` as the last symbol, if it lacks it."""
        return self if MASK in self.index else Vocabulary([*self.symbols[len(SPECIAL_SYMBOLS) :], MASK])

    def is_that_of(self, state: Mapping[str, Any]) -> bool | None:
        """Return whether a checkpoint was trained with these symbols; None if it does not say."""
        record = record_in(state)
        return None if record is None else record == record_of(self.symbols)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read a ``dict.txt``.

        Raises:
            UserError: the file is missing, cannot be read, is not UTF-8, or a line is not a symbol and a count.
        """
        try:
            # not splitlines(): a symbol may be one of Unicode's other line ends
            lines = read_text(path).removesuffix("\n").split("\n")
        except FileNotFoundError:
            raise UserError(f"there is no dictionary file {path}") from None
        except OSError as error:
            raise UserError(f"dictionary {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"dictionary {path} is not UTF-8 at byte {error.start}") from None
        symbols: list[str] = []
        seen = set(SPECIAL_SYMBOLS)
        for number, line in enumerate(lines, start=1):
            line = line.rstrip()  # as fairseq does
            fields = line.removesuffix(_OVERWRITE).rsplit(" ", 1)
            if len(fields) != 2 or not (fields[1].isascii() and fields[1].isdigit()):
                raise UserError(f"dictionary {path}, line {number}: expected 'symbol count', got {line[:100]!r}")
            if number == 1:
                check_mark(path, fields[0])
            if fields[0] in seen and not line.endswith(_OVERWRITE):
                raise UserError(f"dictionary {path}, line {number}: the symbol {fields[0][:100]!r} occurs twice")
            seen.add(fields[0])
            symbols.append(fields[0])
        return cls(symbols)


def record_of(symbols: Sequence[str]) -> dict[str, Any]:
    """Return what a checkpoint records of its dictionary: the number of symbols, and a checksum of them in order."""
    return {"symbols": len(symbols), "sha256": hashlib.sha256("\n".join(symbols).encode()).hexdigest()}


def record_in(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return :func:`record_of` the dictionary of a checkpoint; None if it was saved before there were such records."""
    extra = state.get("extra_state") if isinstance(state, Mapping) else None
    record = extra.get(RECORD) if isinstance(extra, Mapping) else None
    return record if isinstance(record, Mapping) and "symbols" in record else None


def check_mark(path: str | Path, first: str) -> None:
    """Refuse a dictionary whose first symbol begins with a byte-order mark, which editors write: no text has it."""
    if first.startswith("\ufeff") and first != "\ufeff":
        raise UserError(f"dictionary {path} begins with a byte-order mark (U+FEFF): save it as UTF-8 without one")


def find_tokenizer(folders: Sequence[Path]) -> Path | None:
    """Return the file that names a tokenizer from the first folder that has one; others may not exist, or be closed."""
    return next((found for folder in folders for name in TOKENIZERS if os.path.isfile(found := folder / name)), None)


def files_of(tokenizer: Path) -> dict[str, Path]:
    """Return the files of a tokenizer by their standard names; the file that names it may be called otherwise."""
    first, *others = TOKENIZERS[ENCODER_JSON if tokenizer.suffix == ".json" else SENTENCEPIECE_MODEL]
    return {first: tokenizer, **{name: tokenizer.with_name(name) for name in others}}


def read_byte_level(encoder_json: Path, vocab_bpe: Path | None = None) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the pieces of byte-level BPE with their ids, and its merges, by default those beside the pieces.

    Raises:
        UserError: a file is missing or is not in this format, or they do not fit each other.
    """
    vocab_bpe = vocab_bpe or encoder_json.with_name(VOCAB_BPE)
    ids, merges = read_encoder(encoder_json), read_merges(vocab_bpe)
    formed = {"".join(pair) for pair in merges}
    for pair in merges:
        unknown = [piece for piece in (*pair, "".join(pair)) if piece not in ids]
        if unknown:
            raise UserError(f"{vocab_bpe} merges {' and '.join(pair)}, but {encoder_json} has no piece {unknown[0]}")
    special = re.compile("<.*>", re.DOTALL)
    lacking = [piece for piece in ids if len(piece) > 1 and piece not in formed and not special.fullmatch(piece)]
    if len(lacking) > max(_MOST_ADDED, len(formed) // 100):
        raise UserError(
            f"{vocab_bpe} has merges for {len(formed):,} pieces, but none for {len(lacking):,} others of "
            f"{encoder_json}, such as {lacking[0]!r}: it is cut off, or belongs to another file"
        )
    return ids, merges


def read_encoder(path: Path) -> dict[str, int]:
    """Return the ids of the pieces in ``encoder.json``.

    Raises:
        UserError: there is no such file, or it is not in this format.
    """
    text = _text_of(path)
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not an encoder.json of byte-level BPE: {error}") from None
    if not isinstance(ids, dict) or not all(type(number) is int and number >= 0 for number in ids.values()):
        raise UserError(f"{path} is not an encoder.json of byte-level BPE: pieces with their ids are expected")
    try:
        "".join(ids).encode()
    except UnicodeEncodeError:
        problem = "a piece has half of a surrogate pair, which is no Unicode text"
        raise UserError(f"{path} is not an encoder.json of byte-level BPE: {problem}") from None
    lacking = sum(character not in ids for character in byte_characters())
    if lacking:
        raise UserError(f"{path} is not an encoder.json of byte-level BPE: {lacking} of the 256 bytes have no piece")
    if len(set(ids.values())) < len(ids):
        raise UserError(f"{path} gives {len(ids)} pieces only {len(set(ids.values()))} different ids")
    last = max(ids, key=lambda piece: ids[piece])
    if ids[last] > _LARGEST_ID:
        raise UserError(
            f"{path} gives the piece {last[:40]!r} the id {ids[last]:,}, but ids are at most {_LARGEST_ID:,}"
        )
    return ids


def read_merges(path: Path) -> list[tuple[str, str]]:
    """Return the merges in ``vocab.bpe`` in order of priority.

    Raises:
        UserError: there is no such file, or it is not in this format.
    """
    lines = _text_of(path).split("\n")
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines[1:], start=2):
        pair = line.split(" ")
        if line and len(pair) != 2:
            raise UserError(f"{path}, line {number}: expected two pieces, found {line[:40]!r}")
        if line:
            merges.append((pair[0], pair[1]))
    return merges


def byte_characters() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet: printable bytes are themselves, others from U+0100 on."""
    seen = [byte for byte in range(256) if re.match("[!-~¡-¬®-ÿ]", chr(byte))]
    others = [byte for byte in range(256) if byte not in seen]
    return {**{chr(byte): byte for byte in seen}, **{chr(256 + place): byte for place, byte in enumerate(others)}}


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path} of byte-level BPE") from None
    except OSError as error:
        raise UserError(f"{path} of byte-level BPE cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}") from None
