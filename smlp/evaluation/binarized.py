"""Reads the token files that ``fairseq-preprocess`` writes (``--dataset-impl mmap``), with numpy alone.

``PREFIX.idx``, little-endian: 9 bytes ``MMIDIDX\\0\\0``; uint64 version (1); uint8 code of the token type; uint64
number S of sentences; int32 length of each sentence, in tokens (S); int64 byte offset of each in the data file (S).
``PREFIX.bin``: the tokens of all sentences, one after the other, with no header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smlp.errors import UserError

_PIECE = 2**24  # tokens read at a time
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQ")  # version, type code, number of sentences
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}


@dataclass(frozen=True)
class BinarizedTokens:
    """``tokens``: (N,) int64, all sentences in order, each with its ``</s>``; ``lengths``: (S,) int32, of each."""

    tokens: np.ndarray
    lengths: np.ndarray


def read_fairseq_tokens(path_prefix: str | Path) -> BinarizedTokens:
    """Reads ``path_prefix.idx`` and ``path_prefix.bin`` whole.

    Raises UserError naming the file if one is missing, empty, not in this format, truncated, or not of a piece with
    the other.
    """
    index_path, data_path = Path(f"{path_prefix}.idx"), Path(f"{path_prefix}.bin")
    dtype, lengths, offsets = _parse_index(_read(index_path), index_path)
    data = _read(data_path)
    num_tokens = int(lengths.sum(dtype=np.int64))
    if len(data) != num_tokens * dtype.itemsize:
        raise UserError(
            f"{data_path} holds {len(data)} bytes, but {index_path.name} lists {num_tokens} tokens of "
            f"{dtype.itemsize} bytes"
        )
    # Sentences could lie in any order; fairseq writes them in sequence, and a stream needs them so.
    expected = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * dtype.itemsize
    if not np.array_equal(offsets, expected):
        raise UserError(f"{index_path} is damaged: its sentences do not follow each other in {data_path.name}")
    return BinarizedTokens(np.frombuffer(data, dtype).astype(np.int64), lengths)


def count_tokens(path_prefix: str | Path, vocab_size: int) -> np.ndarray:
    """How often each id occurs in ``path_prefix.bin``, (V,) int64; reads the file piece by piece.

    Raises UserError naming the file if one is missing, damaged, or holds an id that is not below ``vocab_size``.
    """
    index_path, data_path = Path(f"{path_prefix}.idx"), Path(f"{path_prefix}.bin")
    dtype, lengths, _ = _parse_index(_read(index_path), index_path)
    if not data_path.is_file() or data_path.stat().st_size != int(lengths.sum(dtype=np.int64)) * dtype.itemsize:
        raise UserError(f"data file {data_path} is missing, or not as long as {index_path.name} says")
    tokens = np.memmap(data_path, dtype, mode="r")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, tokens.size, _PIECE):
        piece = np.bincount(tokens[start : start + _PIECE], minlength=vocab_size)
        if piece.size > vocab_size:
            raise UserError(f"{data_path} holds the id {piece.size - 1}, but the vocabulary has {vocab_size} symbols")
        counts += piece
    return counts


def num_tokens(path_prefix: str | Path) -> int:
    """How many tokens ``path_prefix.idx`` lists.

    Raises UserError naming the file if it is missing, empty or damaged.
    """
    path = Path(f"{path_prefix}.idx")
    return int(_parse_index(_read(path), path)[1].sum(dtype=np.int64))


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error
    if not content:
        raise UserError(f"data file {path} is empty (0 bytes)")
    return content


def _parse_index(content: bytes, path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    start = len(MAGIC) + HEADER.size
    if not content.startswith(MAGIC) or len(content) < start:
        raise UserError(f"{path} is no fairseq index of the mmap kind: it starts with {content[:9]!r}")
    version, code, num_sentences = HEADER.unpack_from(content, len(MAGIC))
    if version != 1 or code not in TOKEN_TYPES:
        raise UserError(f"{path} has version {version} and token type {code}; version 1 and an integer type are known")
    if len(content) != start + 12 * num_sentences or num_sentences == 0:
        raise UserError(
            f"{path} holds {len(content)} bytes, but {num_sentences} sentences need {start + 12 * num_sentences}"
            if num_sentences
            else f"{path} lists no sentence"
        )
    lengths = np.frombuffer(content, "<i4", num_sentences, start)
    offsets = np.frombuffer(content, "<i8", num_sentences, start + 4 * num_sentences)
    if lengths.min() < 0:
        raise UserError(f"{path} is damaged: a sentence of {lengths.min()} tokens")
    return np.dtype(TOKEN_TYPES[code]), lengths, offsets
