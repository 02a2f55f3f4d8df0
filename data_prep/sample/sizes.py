"""What budgets are counted in: documents, bytes, words, or tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from data_prep.tokenize.shared import NOT_TEXT

UNITS = ("documents", "bytes", "words", "tokens")


class Encoder(Protocol):
    """What tokens are counted with: :class:`smlp.text.tokenizer.Tokenizer`."""

    def encode_batch(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Measure:
    """Size of a document.

    Attributes:
        unit: one of ``UNITS``. Tokens are those that ``smlp data binarize`` makes of it: each line with a token
            in it has a ``</s>``, and a document with such a line one more.
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
        ids_N, lengths_L = _encoder(self.tokenizer).encode_batch(text.split("\n"))
        num_lines = int(np.count_nonzero(lengths_L))
        return len(ids_N) + num_lines + 1 if num_lines else 0

    def reason_against(self, text: str) -> str:
        """Why a text has no size, as a reason to drop it; "" if it has one. Half of a surrogate pair has no tokens."""
        if self.unit == "tokens":
            try:
                text.encode()
            except UnicodeEncodeError:
                return NOT_TEXT
        return ""

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
    from smlp.text.tokenizer import load_tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the parts are what is parallel
    return load_tokenizer(folder)
