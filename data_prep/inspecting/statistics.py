"""Counts of tokens, lines, documents and symbols, and how long documents are; in blocks.

A document is the lines up to an empty one. Letters: ``L`` lines, ``D`` documents, ``V`` symbols.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep.inspecting.token_file import TokenFile
from smlp.text.tokenizer import Vocabulary

NUM_BINS = 40  # powers of two


@dataclass
class Statistics:
    """Of one file, or of several together."""

    vocab_size: int
    tokens: int = 0
    lines: int = 0
    ends: int = 0
    documents: int = 0
    shortest: int = 0
    longest: int = 0
    frequency_V: np.ndarray = field(init=False)
    #: documents of 2^i to 2^(i+1) - 1 tokens, with the </s> of each line but not the empty line at the end
    histogram: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.frequency_V = np.zeros(self.vocab_size, np.int64)
        self.histogram = np.zeros(NUM_BINS, np.int64)

    @classmethod
    def of(cls, file: TokenFile, vocab_size: int) -> Statistics:
        """Reads a file that is whole."""
        found = cls(vocab_size, len(file.tokens), len(file.lengths))
        for block in file.token_blocks():
            found.frequency_V += np.bincount(block, minlength=vocab_size)
        open_tokens = 0  # of the document that a block ends in
        for _, _, lengths_L in file.line_blocks():
            is_end_L = lengths_L == 1
            found.ends += int(np.count_nonzero(is_end_L))
            tokens_L = np.concatenate([[0], np.cumsum(np.where(is_end_L, 0, lengths_L))])
            at_ends_D = tokens_L[np.flatnonzero(is_end_L) + 1]
            found._add(np.diff(at_ends_D, prepend=-open_tokens) if at_ends_D.size else at_ends_D)
            open_tokens = int(tokens_L[-1]) - (int(at_ends_D[-1]) if at_ends_D.size else -open_tokens)
        found._add(np.array([open_tokens]))
        return found

    def _add(self, tokens_D: np.ndarray) -> None:
        """Documents by their tokens; empty lines one after the other end none."""
        tokens_D = tokens_D[tokens_D > 0]
        if not tokens_D.size:
            return
        self.shortest = min(int(tokens_D.min()), self.shortest) if self.documents else int(tokens_D.min())
        self.longest = max(int(tokens_D.max()), self.longest)
        self.documents += len(tokens_D)
        self.histogram += np.bincount(np.log2(tokens_D).astype(np.int64), minlength=NUM_BINS)

    def add(self, other: Statistics) -> None:
        """Takes in the counts of another file."""
        if other.documents:
            self.shortest = min(self.shortest, other.shortest) if self.documents else other.shortest
        self.longest = max(self.longest, other.longest)
        for name in ("tokens", "lines", "ends", "documents"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.frequency_V += other.frequency_V
        self.histogram += other.histogram

    @property
    def unknown(self) -> int:
        """Tokens that are ``<unk>``."""
        return int(self.frequency_V[Vocabulary.unk])

    def top(self, number: int) -> dict[int, int]:
        """The ids that come most often, most frequent first, and how often."""
        order = np.argsort(-self.frequency_V, kind="stable")[:number]
        return {token: int(self.frequency_V[token]) for token in order.tolist() if self.frequency_V[token]}

    def to_json(self) -> dict[str, Any]:
        """All but the frequencies."""
        bins = {str(2**power): int(count) for power, count in enumerate(self.histogram) if count}
        return {
            **{name: getattr(self, name) for name in ("tokens", "lines", "ends", "documents", "shortest", "longest")},
            "unknown": self.unknown,
            "unknown_share": self.unknown / self.tokens if self.tokens else 0.0,
            "tokens_per_document": (self.tokens - self.ends) / self.documents if self.documents else 0.0,
            "documents_by_tokens": bins,
        }
