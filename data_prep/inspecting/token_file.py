"""fairseq's ``.bin`` and ``.idx`` (mmap) read in blocks, with what is wrong with them.

Letters: ``N`` tokens, ``L`` lines, ``V`` symbols of the dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smlp.errors import UserError
from smlp.evaluation.binarized import HEADER, MAGIC, TOKEN_TYPES
from smlp.tokenizer import Vocabulary

BLOCK_LINES = 1 << 20
BLOCK_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenFile:
    """One split in one folder. ``lengths`` and ``pointers`` (L,) and ``tokens`` (N,) lie on disk."""

    prefix: Path
    lengths: np.ndarray
    pointers: np.ndarray
    tokens: np.ndarray

    @classmethod
    def open(cls, prefix: Path) -> TokenFile:
        """Opens ``PREFIX.idx`` and ``PREFIX.bin``.

        Raises:
            UserError: one is missing or damaged, or they are not of a size; the message has the numbers.
        """
        index, data = prefix.with_name(f"{prefix.name}.idx"), prefix.with_name(f"{prefix.name}.bin")
        for path in (index, data):
            if not path.is_file():
                raise UserError(f"{path} is missing")
        size, first = index.stat().st_size, len(MAGIC) + HEADER.size
        with index.open("rb") as file:
            start = file.read(first)
        if len(start) < first or not start.startswith(MAGIC):
            raise UserError(f"{index} is no fairseq index of the mmap kind: it has {size} bytes, first {start[:9]!r}")
        version, code, num_lines = HEADER.unpack_from(start, len(MAGIC))
        if version != 1 or code not in TOKEN_TYPES:
            raise UserError(f"{index} has version {version} and token type {code}: version 1 and integers are known")
        if size != first + 12 * num_lines:
            raise UserError(f"{index} has {size} bytes, but {num_lines} lines need {first + 12 * num_lines}")
        if not num_lines:
            raise UserError(f"{index} lists no line")
        dtype = np.dtype(TOKEN_TYPES[code])
        lengths = np.memmap(index, "<i4", "r", first, (num_lines,))
        pointers = np.memmap(index, "<i8", "r", first + 4 * num_lines, (num_lines,))
        listed, found = int(lengths.sum(dtype=np.int64)) * dtype.itemsize, data.stat().st_size
        if listed != found:
            raise UserError(f"{data} has {found} bytes, but the lines of {index.name} need {listed}")
        return cls(prefix, lengths, pointers, np.memmap(data, dtype, "r"))

    def token_blocks(self) -> Iterator[np.ndarray]:
        """The tokens in order."""
        for start in range(0, len(self.tokens), BLOCK_TOKENS):
            yield self.tokens[start : start + BLOCK_TOKENS]

    def line_blocks(self) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """Lines in order: number of the first, its first token, lengths (L,), and the last token of each (L,)."""
        position = 0
        for line in range(0, len(self.lengths), BLOCK_LINES):
            lengths_L = self.lengths[line : line + BLOCK_LINES].astype(np.int64)
            ends_L = position + np.cumsum(lengths_L)
            yield line, position, lengths_L, self.tokens[ends_L - 1].astype(np.int64)
            position = int(ends_L[-1])

    def problems(self, vocab_size: int, needs_document_end: bool) -> Iterator[str]:
        """What is wrong, a sentence each; :meth:`open` has compared sizes.

        Args:
            vocab_size: of the dictionary.
            needs_document_end: whether the last line must be empty, as documents leave it.
        """
        name, itemsize = f"{self.prefix}.idx", self.tokens.dtype.itemsize
        end = Vocabulary.eos
        if self.lengths.min() < 1:
            yield f"{name} lists a line of {self.lengths.min()} tokens, and each has its </s>"
            return
        for line, position, lengths_L, last_L in self.line_blocks():
            starts_L = (position + np.cumsum(lengths_L) - lengths_L) * itemsize
            wrong = np.flatnonzero(self.pointers[line : line + len(lengths_L)] != starts_L)
            if wrong.size:
                where = line + int(wrong[0])
                yield (
                    f"{name} says that line {where} begins at byte {self.pointers[where]}, but the lines before it end "
                    f"at {starts_L[wrong[0]]}"
                )
                break
            wrong = np.flatnonzero(last_L != end)
            if wrong.size:
                where = line + int(wrong[0])
                yield f"{self.prefix}.bin: line {where} ends in the id {last_L[wrong[0]]}, not in </s> ({end})"
                break
        largest = max(int(block.max()) for block in self.token_blocks())
        if largest >= vocab_size:
            yield f"{self.prefix}.bin holds the id {largest}, but the dictionary has {vocab_size} symbols"
        if needs_document_end and self.lengths[-1] != 1:
            yield f"{self.prefix}.bin does not end with a document: its last line has {self.lengths[-1]} tokens, not 1"
