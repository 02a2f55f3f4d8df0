"""Perplexities of a scored text, as a whole and by document, and the words and bytes that each token stands for.

Letters: ``N`` tokens, ``L`` lines (each with its ``</s>``), ``V`` different ids, ``D`` documents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from smlp.errors import UserError
from smlp.evaluation.perplexity import Perplexity, TextSize, line_sizes
from smlp.text.binarized import BinarizedTokens
from smlp.text.tokenizer import Tokenizer, Vocabulary

_SHOWN_WORDS = 8


@dataclass(frozen=True)
class TextSizes:
    """Words and bytes by token: to be added up over tokens that were scored."""

    #: whether they were counted in the original text instead of the decoded tokens
    of_original: bool
    words_N: np.ndarray
    bytes_N: np.ndarray


def tokens_of(lines: list[str], tokenizer: Tokenizer) -> BinarizedTokens:
    """Return the stream that ``fairseq-preprocess`` makes of a text's pieces: each line, empty ones too, ends in
    ``</s>``."""
    encoded = [[*tokenizer.encode(line), Vocabulary.eos] for line in lines]
    lengths_L = np.array([len(tokens) for tokens in encoded], dtype=np.int32)
    return BinarizedTokens(np.array([token for tokens in encoded for token in tokens], dtype=np.int64), lengths_L)


def original_sizes(lines: list[str], stream: BinarizedTokens) -> TextSizes:
    """Return the sizes of the original text; those of each line are assigned to its last token, or, if it has none, to
    the one before (at the beginning, to the first).

    Raises:
        UserError: the text has another number of lines than the stream.
    """
    if len(lines) != len(stream.lengths):
        raise UserError(
            f"--text has {len(lines)} lines, but the data have {len(stream.lengths)}: were they made from this text, "
            "line by line (smlp data binarize --format lines)?"
        )
    sizes_2N = np.zeros((2, len(stream.tokens)), dtype=np.int64)
    last_L = np.maximum(np.cumsum(stream.lengths, dtype=np.int64) - 1, 0)
    np.add.at(sizes_2N, (slice(None), last_L), line_sizes(lines))
    return TextSizes(True, *sizes_2N)


def decoded_sizes(stream: BinarizedTokens, tokenizer: Tokenizer) -> TextSizes:
    """Return the sizes of the text that the tokens stand for; a word counts at the token that it starts in.

    A space other than ASCII's whose bytes lie in several tokens ends no word.
    """
    ids_V, number_N = np.unique(stream.tokens, return_inverse=True)
    contents = [tokenizer.content(int(token)) for token in ids_V]
    texts = [content.decode("utf-8", "replace") for content in contents]
    bytes_V = np.array([len(content) for content in contents], dtype=np.int64)
    leading_V = np.array([tokenizer.strips_lines and text.startswith(" ") for text in texts], dtype=np.int64)
    starts_inside_V = np.array([_starts_inside(text) for text in texts], dtype=np.int64)
    begins_with_word_V = np.array([not text[:1].isspace() for text in texts], dtype=bool)
    ends_in_space_V = np.array([text[-1:].isspace() for text in texts], dtype=bool)

    line_start_N = np.zeros(len(stream.tokens), dtype=bool)
    line_start_N[(np.cumsum(stream.lengths, dtype=np.int64) - stream.lengths)[stream.lengths > 0]] = True
    after_space_N = line_start_N.copy()
    after_space_N[1:] |= ends_in_space_V[number_N[:-1]]
    is_end_N = stream.tokens == Vocabulary.eos
    # if the tokenizer strips lines, a space that is no part of the text begins each; others are (indentation, say)
    bytes_N = bytes_V[number_N] - leading_V[number_N] * (line_start_N & ~is_end_N)
    words_N = starts_inside_V[number_N] + (begins_with_word_V[number_N] & after_space_N)
    return TextSizes(False, words_N, bytes_N)


def _starts_inside(text: str) -> int:
    """Count the words that start inside a piece, not at its beginning."""
    return sum(before.isspace() and not after.isspace() for before, after in itertools.pairwise(text))


def documents_of(stream: BinarizedTokens, kind: str) -> np.ndarray:
    """Return the number of the document that each token belongs to, (N,); an empty line belongs to the one before it.

    Args:
        stream: of the text.
        kind: one of :data:`smlp.evaluation.DOCUMENTS`.
    """
    last_L = np.cumsum(stream.lengths, dtype=np.int64) - 1
    if kind == "line":
        number_L = np.cumsum(stream.lengths > 0) - 1  # a line of no token is no document
    else:
        is_empty_L = (stream.lengths == 0) | (stream.lengths == 1) & (stream.tokens[last_L] == Vocabulary.eos)
        begins_L = ~is_empty_L & np.concatenate([[True], is_empty_L[:-1]])
        # empty lines before the first document belong to it
        number_L = np.maximum(np.cumsum(begins_L) - 1, 0)
    return np.repeat(number_L, stream.lengths)


def first_words(tokens_N: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the first words of a document, decoded."""
    return " ".join(tokenizer.decode(tokens_N[: 8 * _SHOWN_WORDS].tolist()).split()[:_SHOWN_WORDS])


@dataclass(frozen=True)
class Evaluation:
    """A text with the log-probability of each token, (N,), NaN where it was not scored."""

    stream: BinarizedTokens
    log_probs_N: np.ndarray
    #: words and bytes; of the original text only if every token was scored
    sizes: TextSizes

    @property
    def is_scored_N(self) -> np.ndarray:
        """Return whether each token was scored, (N,) bool."""
        return ~np.isnan(self.log_probs_N)

    @property
    def unknown_share(self) -> float:
        """Share of ``<unk>`` among the scored tokens."""
        return float((self.stream.tokens[self.is_scored_N] == Vocabulary.unk).mean())

    @property
    def total(self) -> Perplexity:
        """Perplexity of all scored tokens.

        Raises:
            UserError: there is none.
        """
        nothing_N = np.zeros(len(self.log_probs_N), dtype=np.int64)
        (sums,) = self._sums(nothing_N, 1)
        return Perplexity(*sums)

    def documents(self, document_N: np.ndarray, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """Yield a record for each document, in order; their sums are those of the whole text.

        Args:
            document_N: number of the document that each token belongs to, (N,), ascending from 0.
            tokenizer: decodes the first words.
        """
        starts_D = np.flatnonzero(np.diff(document_N, prepend=-1))
        for index, sums in enumerate(self._sums(document_N, len(starts_D))):
            begin = starts_D[index]
            end = starts_D[index + 1] if index + 1 < len(starts_D) else len(document_N)
            record = {"index": index, "begins": first_words(self.stream.tokens[begin:end], tokenizer)}
            yield record | figures(Perplexity(*sums) if sums[1] else None)

    def _sums(self, group_N: np.ndarray, num_groups: int) -> Iterator[tuple[float, int, TextSize]]:
        """Return the negative log-likelihood, number and text of the scored tokens of each group."""
        scored = self.is_scored_N
        group_K = group_N[scored]
        counted = (
            -self.log_probs_N.astype(np.float64),
            np.ones(len(scored)),
            self.sizes.words_N,
            self.stream.tokens == Vocabulary.eos,
            self.sizes.bytes_N,
        )
        nll, *counts = (np.bincount(group_K, values[scored], num_groups) for values in counted)
        return ((float(n), int(k), TextSize(*map(int, of_text))) for n, k, *of_text in zip(nll, *counts, strict=True))


#: JSON names of a perplexity's unit, and of its value
_COUNTS = {"tokens": "num_tokens", "words": "num_words", "line_ends": "num_lines", "bytes": "num_bytes"}
_RATES = {
    "nats_per_token": "nats_per_token",
    "bits_per_token": "bits_per_token",
    "perplexity_per_token": "per_token",
    "perplexity_per_word": "per_word",
    "perplexity_per_word_or_line_end": "per_word_or_line_end",
    "bits_per_byte": "bits_per_byte",
}


def figures(perplexity: Perplexity | None) -> dict[str, Any]:
    """Return the numbers of a perplexity by name, for JSON; zeros and nulls where there is none."""
    if perplexity is None:
        return dict.fromkeys(_COUNTS, 0) | {"nll": 0.0} | dict.fromkeys(_RATES)
    counted = {"num_tokens": perplexity.num_tokens, **vars(perplexity.text)}
    rates = {name: getattr(perplexity, attribute) for name, attribute in _RATES.items()}
    finite = {name: rate if rate is not None and math.isfinite(rate) else None for name, rate in rates.items()}
    return {name: counted[field] for name, field in _COUNTS.items()} | {"nll": perplexity.total_nll} | finite
