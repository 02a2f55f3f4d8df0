"""Perplexities of a scored text, as a whole and by document.

Letters: ``N`` tokens of the text, ``D`` documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from smlp.evaluation.perplexity import Perplexity, TextSize
from smlp.evaluation.text_sizes import TextSizes, first_words
from smlp.text.binarized import BinarizedTokens
from smlp.text.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True)
class Evaluation:
    """A text with the log-probability of each token, (N,), NaN where it was not scored."""

    stream: BinarizedTokens
    log_probs_N: np.ndarray
    #: words and bytes; of the original text only where every token was scored
    sizes: TextSizes

    @property
    def is_scored_N(self) -> np.ndarray:
        """(N,) bool."""
        return ~np.isnan(self.log_probs_N)

    @property
    def unknown_share(self) -> float:
        """Share of ``<unk>`` among the scored tokens."""
        return float((self.stream.tokens[self.is_scored_N] == Vocabulary.unk).mean())

    @property
    def total(self) -> Perplexity:
        """Of all scored tokens.

        Raises:
            UserError: there is none.
        """
        nothing_N = np.zeros(len(self.log_probs_N), dtype=np.int64)
        (sums,) = self._sums(nothing_N, 1)
        return _perplexity(*sums)

    def documents(self, document_N: np.ndarray, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """A record for each document, in order; the sums over them are those of the whole.

        Args:
            document_N: which one each token belongs to, (N,), ascending from 0.
            tokenizer: decodes how it begins.
        """
        starts_D = np.flatnonzero(np.diff(document_N, prepend=-1))
        for index, sums in enumerate(self._sums(document_N, len(starts_D))):
            begin = starts_D[index]
            end = starts_D[index + 1] if index + 1 < len(starts_D) else len(document_N)
            record = {"index": index, "begins": first_words(self.stream.tokens[begin:end], tokenizer)}
            yield record | figures(_perplexity(*sums) if sums[1] else None)

    def _sums(self, group_N: np.ndarray, num_groups: int) -> Iterator[tuple[float, int, int, int, int]]:
        """Negative log-likelihood, tokens, words, line ends and bytes of the scored tokens of each group."""
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
        return ((float(n), *map(int, rest)) for n, *rest in zip(nll, *counts, strict=True))


def _perplexity(nll: float, num_tokens: int, num_words: int, num_lines: int, num_bytes: int) -> Perplexity:
    return Perplexity(nll, num_tokens, TextSize(num_words, num_lines, num_bytes))


#: names in JSON of what a perplexity counts and of what it says
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
    """The numbers of a perplexity by name, for JSON; zeros and nulls where there is none."""
    if perplexity is None:
        return dict.fromkeys(_COUNTS, 0) | {"nll": 0.0} | dict.fromkeys(_RATES)
    counted = {"num_tokens": perplexity.num_tokens, **vars(perplexity.text)}
    rates = {name: getattr(perplexity, attribute) for name, attribute in _RATES.items()}
    finite = {name: rate if rate is not None and math.isfinite(rate) else None for name, rate in rates.items()}
    return {name: counted[field] for name, field in _COUNTS.items()} | {"nll": perplexity.total_nll} | finite
