"""The one convention by which every model here is given a perplexity.

A text is a stream of N tokens in which each line ends in ``</s>``; every token, ``</s>`` included, is predicted, and
the natural negative log-likelihoods add up to the text's total. Per token, the total is spread over the N tokens; per
word, over the whitespace-separated words of the original text, where a line end is no word; per byte, in bits, over its
bytes in UTF-8, where a line end is one byte. Numbers per word and per byte compare models with different
vocabularies; per-token numbers do not. Where line ends are counted as words (usual for WikiText), the same total is
spread over words and lines, which gives smaller figures: never compare across the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smlp.errors import UserError
from smlp.files import read_text

#: losses above this many bits have no finite perplexity; below it, even sums of a few perplexities fit into a float
_MOST_BITS = 1000.0


def of_nats(loss: float) -> float:
    """Return e^loss, or infinity; NaN for NaN."""
    return math.inf if loss > _MOST_BITS * math.log(2) else math.exp(loss)


def of_bits(loss: float) -> float:
    """Return 2^loss, or infinity; NaN for NaN."""
    return math.inf if loss > _MOST_BITS else 2.0**loss


@dataclass(frozen=True)
class TextSize:
    """Words, lines and UTF-8 bytes of a text; empty lines count as lines, because they are predicted too, and each
    line's end as one byte."""

    num_words: int
    num_lines: int
    num_bytes: int


@dataclass(frozen=True)
class Perplexity:
    """Total negative log-likelihood in nats, over how many tokens, and of what text.

    Raises:
        UserError: there is no token.
    """

    total_nll: float
    num_tokens: int
    text: TextSize

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise UserError(f"a perplexity needs at least one token, not {self.num_tokens}")

    @classmethod
    def of(cls, log_probs: np.ndarray, text: TextSize) -> Perplexity:
        """Build a perplexity from the natural log-probability of each token, (N,)."""
        return cls(-float(log_probs.sum()), len(log_probs), text)

    @property
    def nats_per_token(self) -> float:
        return self.total_nll / self.num_tokens

    @property
    def bits_per_token(self) -> float:
        """The loss that fairseq prints."""
        return self.nats_per_token / math.log(2)

    @property
    def bits_per_byte(self) -> float | None:
        """Return the bits per byte; None for a text without bytes."""
        return self.total_nll / math.log(2) / self.text.num_bytes if self.text.num_bytes else None

    @property
    def per_token(self) -> float:
        return of_nats(self.nats_per_token)

    @property
    def per_word(self) -> float | None:
        """Return the perplexity per word; None for a text without words."""
        return of_nats(self.total_nll / self.text.num_words) if self.text.num_words else None

    @property
    def per_word_or_line_end(self) -> float | None:
        """Return the perplexity per word or line end; None for a text without either."""
        count = self.text.num_words + self.text.num_lines
        return of_nats(self.total_nll / count) if count else None


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a UTF-8 text file without their ends, which may be of any kind, as ``fairseq-preprocess``
    reads them, and without a byte-order mark.

    Raises:
        UserError: it cannot be read.
    """
    try:
        text = read_text(path, "utf-8-sig")  # a byte-order mark is no text
    except OSError as error:
        raise UserError(f"text file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"text file {path} is not UTF-8: {error.reason}") from error
    return text.removesuffix("\n").split("\n") if text else []


def line_sizes(lines: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the words and bytes of each line, its end included, both (L,) int64."""
    words_L = np.array([len(line.split()) for line in lines], dtype=np.int64)
    bytes_L = np.array([len(line.encode()) + 1 for line in lines], dtype=np.int64)
    return words_L, bytes_L


def measure_text(path: Path) -> TextSize:
    """Count a UTF-8 text file's words, lines and bytes. Raises UserError if it cannot be read."""
    words_L, bytes_L = line_sizes(read_lines(path))
    return TextSize(int(words_L.sum()), len(words_L), int(bytes_L.sum()))
