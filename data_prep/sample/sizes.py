"""What budgets are counted in: documents, bytes, words, or tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

UNITS = ("documents", "bytes", "words", "tokens")


class Encoder(Protocol):
    """What tokens are counted with: :class:`smlp.tokenizer.Tokenizer`."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Measure:
    """Size of a document.

    Attributes:
        unit: one of ``UNITS``. Tokens are those of training: a ``</s>`` for each line and one more for the document.
        tokenizer: folder that ``smlp data tokenizer`` wrote, for tokens.
    """

    unit: str
    tokenizer: Path | None = None

    def __call__(self, text: str) -> int:
        if self.unit == "documents":
            return 1
        if self.unit == "bytes":
            return len(text.encode("utf-8", "surrogatepass"))
        if self.unit == "words":
            return len(text.split())
        encoder = _encoder(self.tokenizer)
        lines = [line for line in text.split("\n") if line.strip()]
        return sum(len(encoder.encode(line)) + 1 for line in lines) + 1

    def beginning(self, text: str, size: int) -> str:
        """The longest beginning of ``text`` of at most ``size``, cut between words; may be empty."""
        if self(text) <= size:
            return text
        if self.unit == "documents":
            return ""
        ends = [end + 1 for end in range(len(text) - 1) if not text[end].isspace() and text[end + 1].isspace()]
        low, high = 0, len(ends)  # how many of the words are sure to fit, and how many at most may
        while low < high:
            middle = (low + high + 1) // 2
            if self(text[: ends[middle - 1]]) <= size:
                low = middle
            else:
                high = middle - 1
        return text[: ends[low - 1]] if low else ""


@cache
def _encoder(folder: Path) -> Encoder:
    from smlp.tokenizer import load_tokenizer

    return load_tokenizer(folder)
