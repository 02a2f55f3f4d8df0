"""Read fairseq's ``.bin`` and ``.idx`` (mmap) in blocks, find what is wrong with them, and decode their documents.

Letters: ``N`` tokens, ``L`` lines, ``V`` symbols of the dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from smlp.errors import UserError
from smlp.text.binarized import FIRST_LENGTH, read_header
from smlp.text.tokenizer import Tokenizer, Vocabulary

BLOCK_LINES = 1 << 18
BLOCK_TOKENS = 1 << 20


def _nobody(num_bytes: int) -> None:
    """Ignore the number of bytes that were read."""


@dataclass(frozen=True)
class Numbers:
    """``size`` numbers of a type in a file, from byte ``first`` on, read when they are asked for.

    They are not mapped into memory: pages of a mapped file that were read count as resident, and all of it as address
    space.
    """

    path: Path
    dtype: np.dtype
    first: int
    size: int
    #: called with the number of bytes that were read
    seen: Callable[[int], None] = field(default=_nobody, compare=False)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int | slice) -> np.ndarray | np.integer:
        """Return one number, or an array of those of a slice without a step."""
        if isinstance(place, int):
            return self[place : place + 1][0] if place >= 0 else self[self.size + place]
        start, stop, _ = place.indices(self.size)
        count = max(stop - start, 0)
        self.seen(count * self.dtype.itemsize)
        return np.fromfile(self.path, self.dtype, count, offset=self.first + start * self.dtype.itemsize)

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        """Yield all of them in order, ``size`` at a time."""
        return (self[start : start + size] for start in range(0, self.size, size))


@dataclass(frozen=True)
class TokenFile:
    """One split in one folder. ``lengths`` and ``pointers`` (L,) and ``tokens`` (N,) stay on disk."""

    prefix: Path
    lengths: Numbers
    pointers: Numbers
    tokens: Numbers

    @classmethod
    def open(cls, prefix: Path, seen: Callable[[int], None] = _nobody) -> TokenFile:
        """Open ``PREFIX.idx`` and ``PREFIX.bin``; ``seen`` is called with every number of bytes that is read of them.

        Raises:
            UserError: one is missing or damaged, or their sizes do not fit; the message has the numbers.
        """
        index, data = prefix.with_name(f"{prefix.name}.idx"), prefix.with_name(f"{prefix.name}.bin")
        for path in (index, data):
            if not path.is_file():
                raise UserError(f"{path} is missing")
        with index.open("rb") as file:
            dtype, num_lines = read_header(file.read(FIRST_LENGTH), index.stat().st_size, index)
        lengths = Numbers(index, np.dtype("<i4"), FIRST_LENGTH, num_lines, seen)
        pointers = Numbers(index, np.dtype("<i8"), FIRST_LENGTH + 4 * num_lines, num_lines, seen)
        num_tokens = sum(int(lengths_L.sum(dtype=np.int64)) for lengths_L in lengths.blocks(BLOCK_LINES))
        listed, found = num_tokens * dtype.itemsize, data.stat().st_size
        if listed != found:
            raise UserError(f"{data} has {found} bytes, but the lines of {index.name} need {listed}")
        return cls(prefix, lengths, pointers, Numbers(data, dtype, 0, num_tokens, seen))

    def token_blocks(self) -> Iterator[np.ndarray]:
        """Yield the tokens in order."""
        return self.tokens.blocks(BLOCK_TOKENS)

    def line_blocks(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield blocks of lines in order: number of the first, its first token, lengths (L,)."""
        line, position = 0, 0
        for block in self.lengths.blocks(BLOCK_LINES):
            lengths_L = block.astype(np.int64)
            yield line, position, lengths_L
            line, position = line + len(lengths_L), position + int(lengths_L.sum())

    def _last_tokens(self, position: int, lengths_L: np.ndarray) -> np.ndarray:
        """Return the last token of each of some lines (L,) that begin at token ``position``."""
        last_L = position + np.cumsum(lengths_L) - 1
        found_L = np.empty(len(last_L), self.tokens.dtype)
        for start in range(position, int(last_L[-1]) + 1, BLOCK_TOKENS):
            low, high = np.searchsorted(last_L, [start, start + BLOCK_TOKENS])
            found_L[low:high] = self.tokens[start : start + BLOCK_TOKENS][last_L[low:high] - start]
        return found_L

    def problems(self, vocab_size: int, needs_document_end: bool) -> Iterator[str]:
        """Yield a sentence for each thing that is wrong; :meth:`open` has compared sizes.

        ``vocab_size`` is that of the dictionary; with ``needs_document_end``, the last line must be empty.
        """
        name, itemsize = f"{self.prefix}.idx", self.tokens.dtype.itemsize
        end = Vocabulary.eos
        shortest = min(int(lengths_L.min()) for lengths_L in self.lengths.blocks(BLOCK_LINES))
        if shortest < 1:
            yield f"{name} lists a line of {shortest} tokens, and each has its </s>"
            return
        for line, position, lengths_L in self.line_blocks():
            starts_L = (position + np.cumsum(lengths_L) - lengths_L) * itemsize
            wrong = np.flatnonzero(self.pointers[line : line + len(lengths_L)] != starts_L)
            if wrong.size:
                where = line + int(wrong[0])
                yield (
                    f"{name} says that line {where} begins at byte {self.pointers[where]}, but the lines before it end "
                    f"at {starts_L[wrong[0]]}"
                )
                break
            last_L = self._last_tokens(position, lengths_L)
            wrong = np.flatnonzero(last_L != end)
            if wrong.size:
                where = line + int(wrong[0])
                yield f"{self.prefix}.bin: line {where} ends in the id {last_L[wrong[0]]}, not in </s> ({end})"
                break
        bounds = [(int(block.min()), int(block.max())) for block in self.token_blocks()]
        for token in sorted({min(least for least, _ in bounds), max(most for _, most in bounds)}):
            if not 0 <= token < vocab_size:
                yield f"{self.prefix}.bin holds the id {token}, but the dictionary has {vocab_size} symbols"
        if needs_document_end and self.lengths[-1] != 1:
            yield f"{self.prefix}.bin does not end with a document: its last line has {self.lengths[-1]} tokens, not 1"


SHOWN_TOKENS = 100  # of a document, at most
_NEAR = 1 << 8  # lines among which the next document is sought first


def samples_of(prefix: Path, tokenizer: Tokenizer, number: int) -> list[str]:
    """Return the beginnings of ``number`` documents (at most) at equal distances in a file that is whole."""
    file = TokenFile.open(prefix)
    total = len(file.lengths)
    number = min(number, total)
    texts, line = [], -1
    for wanted in (total * place // number for place in range(number)):
        if wanted <= line or (found := _document_start(file, wanted)) is None:  # shown already, or none is left
            continue
        line = found
        first = int(file.pointers[line]) // file.tokens.dtype.itemsize
        lengths_L = file.lengths[line : line + SHOWN_TOKENS]
        ends = np.flatnonzero(lengths_L == 1)
        num_tokens = int(lengths_L[: ends[0] if ends.size else None].sum())
        shown = file.tokens[first : first + min(num_tokens, SHOWN_TOKENS)].tolist()
        texts.append(tokenizer.decode(shown).rstrip("\n") + (" ..." if num_tokens > SHOWN_TOKENS else ""))
    return texts


def _document_start(file: TokenFile, line: int) -> int | None:
    """Return the first line from ``line`` on that begins a document; look at one block of lines only."""
    for num_lines in (_NEAR, BLOCK_LINES):
        lengths_L = file.lengths[max(line - 1, 0) : line + num_lines]
        is_end_L = lengths_L == 1
        begins_L = ~is_end_L & np.concatenate([[line == 0], is_end_L[:-1]])
        found = np.flatnonzero(begins_L)
        if found.size:
            return max(line - 1, 0) + int(found[0])
    return None
