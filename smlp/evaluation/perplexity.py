"""The one convention by which every model here is given a perplexity.

A text is a stream of N tokens in which each line ends in ``</s>``; every token, ``</s>`` included, is predicted, and
the natural negative log-likelihoods add up to the text's total. Per token the total is spread over the N tokens; per
word over the whitespace-separated words of the original text, a line end being no word. Per-word numbers compare
models with different vocabularies; per-token numbers do not. Where line ends are counted as words (usual for
WikiText), the same total is spread over words and lines, which gives smaller figures: never compare across the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smlp.errors import UserError


@dataclass(frozen=True)
class TextSize:
    """Words and lines of the original text; empty lines count as lines, for they too are predicted."""

    num_words: int
    num_lines: int


@dataclass(frozen=True)
class Perplexity:
    """Total negative log-likelihood in nats, over how many tokens, and of what text."""

    total_nll: float
    num_tokens: int
    text: TextSize

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.text.num_words < 1:
            raise UserError(
                f"a perplexity needs at least one token and one word, not {self.num_tokens} and {self.text.num_words}"
            )

    @classmethod
    def of(cls, log_probs: np.ndarray, text: TextSize) -> Perplexity:
        """From the natural log-probability of each token, shape (N,)."""
        return cls(-float(log_probs.sum()), len(log_probs), text)

    @property
    def per_token(self) -> float:
        return math.exp(self.total_nll / self.num_tokens)

    @property
    def per_word(self) -> float:
        return math.exp(self.total_nll / self.text.num_words)

    @property
    def per_word_or_line_end(self) -> float:
        return math.exp(self.total_nll / (self.text.num_words + self.text.num_lines))


def measure_text(path: Path) -> TextSize:
    """Counts a UTF-8 text file's words and lines. Raises UserError if it cannot be read."""
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            words = [len(line.split()) for line in lines]
    except OSError as error:
        raise UserError(f"text file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"text file {path} is not UTF-8: {error.reason}") from error
    return TextSize(sum(words), len(words))
