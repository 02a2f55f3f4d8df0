"""Interpolated modified Kneser-Ney n-gram models on integer tokens, in numpy.

N: tokens of a stream, V: vocabulary size, k: order of a level (1 = unigrams), G_k: distinct k-grams of the training
stream. The method is that of Chen and Goodman (1999), section 3, with three discounts a level:

    p_k(w | h) = max(c_k(hw) - D(c_k(hw)), 0) / c_k(h.) + backoff_k(h) * p_{k-1}(w | h without its first token)

``c_k`` counts occurrences at the highest order and, below it, the distinct tokens seen to the left of the k-gram;
``backoff_k(h)`` is the mass discounted after h, or 1 for a context never seen; ``p_0`` is uniform over V. So every
context has a proper distribution over the whole vocabulary. A stream is one sequence: a context reaches back over line
ends, as it does for a language model trained on fixed blocks, and only the first tokens have shorter contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smlp.errors import UserError

NUM_DISCOUNTS = 3  # for counts 1, 2, and 3 or more
DEFAULT_DISCOUNT = 0.75  # if a text is too small to estimate one


@dataclass(frozen=True)
class _Level:
    """One order's tables. A k-gram's id is its place in ``keys``; contexts are numbered by the level below.

    keys: (G_k,) sorted int64, id of the context (k-1)-gram times V plus the last token
    scores: (G_k,) max(c - D(c), 0) / c(h.), the discounted probability
    backoff: (G_{k-1},) mass left for the level below, by context
    """

    keys: np.ndarray
    scores: np.ndarray
    backoff: np.ndarray

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the ids of the k-grams with these keys, -1 for those not in the training stream; shape of ``keys``."""
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[places] == keys, places, -1)


class NGramModel:
    """An n-gram model, made by :meth:`fit`."""

    def __init__(self, levels: list[_Level], vocab_size: int) -> None:
        self._levels = levels
        self.vocab_size = vocab_size

    @property
    def order(self) -> int:
        return len(self._levels)

    @classmethod
    def fit(cls, tokens: np.ndarray, order: int, vocab_size: int) -> NGramModel:
        """Estimate a model from a stream of token ids (N,), each in [0, vocab_size).

        Raises:
            UserError: the order is below 1, the stream is shorter than the order, or a token is out of range.
        """
        if order < 1:
            raise UserError(f"the order of an n-gram model must be at least 1, not {order}")
        tokens = _checked(tokens, vocab_size)
        if len(tokens) < order:
            raise UserError(f"an n-gram model of order {order} needs at least {order} tokens, not {len(tokens)}")
        grams = _number_grams(tokens, order, vocab_size)
        levels = []
        for k in range(1, order + 1):
            keys, ids, _ = grams[k - 1]
            if k == order:
                counts = np.bincount(ids, minlength=len(keys))
            else:
                # Each distinct (k+1)-gram is one left neighbour of the k-gram that it ends in.
                ends_in = ids[grams[k][2] - (k - 1)]
                counts = np.bincount(ends_in, minlength=len(keys))
            num_contexts = 1 if k == 1 else len(grams[k - 2][0])
            levels.append(_discount(keys, counts, num_contexts, vocab_size))
        return cls(levels, vocab_size)

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """Return the natural log-probability of each token (N,) given those before it, (N,) float64."""
        tokens = _checked(tokens, self.vocab_size)
        num_tokens = len(tokens)
        probs = np.full(num_tokens, 1.0 / self.vocab_size)
        contexts = np.zeros(num_tokens, dtype=np.int64)  # id of the (k-1)-gram before each token, -1: never seen
        for level in self._levels:
            known = contexts >= 0
            ids = np.full(num_tokens, -1, dtype=np.int64)
            ids[known] = level.find(contexts[known] * self.vocab_size + tokens[known])
            probs[known] *= level.backoff[contexts[known]]
            probs[ids >= 0] += level.scores[ids[ids >= 0]]
            contexts = np.concatenate([[-1], ids[:-1]])
        return np.log(probs)


def _checked(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(f"tokens must be a non-empty row of integers, not {tokens.dtype} of shape {tokens.shape}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise UserError(f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    return tokens.astype(np.int64)


def _number_grams(tokens: np.ndarray, order: int, vocab_size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return for each order k the sorted keys (G_k,), the id of the k-gram that starts at each position (N - k + 1,),
    and the first position at which each distinct k-gram ends (G_k,)."""
    grams = []
    contexts = np.zeros(len(tokens), dtype=np.int64)
    for k in range(1, order + 1):
        keys, first, ids = np.unique(contexts * vocab_size + tokens[k - 1 :], return_index=True, return_inverse=True)
        grams.append((keys, ids, first + k - 1))
        contexts = ids[:-1]
    return grams


def _discount(keys: np.ndarray, counts: np.ndarray, num_contexts: int, vocab_size: int) -> _Level:
    """Turn counts (G_k,) into discounted probabilities and back-off masses."""
    discounts = _discounts(counts)
    capped = np.minimum(counts, NUM_DISCOUNTS)
    removed = discounts[capped]
    contexts = keys // vocab_size
    totals = np.bincount(contexts, weights=counts, minlength=num_contexts)
    # The very first k-grams of a stream have no left neighbour, so that a context's total can be zero.
    safe_totals = np.maximum(totals, 1)
    backoff = np.bincount(contexts, weights=removed, minlength=num_contexts) / safe_totals
    backoff[totals == 0] = 1.0
    return _Level(keys, (counts - removed) / safe_totals[contexts], backoff)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Estimate discounts for counts 0, 1, 2 and 3 or more, (4,), from the counts of counts.

    If an estimate is not strictly between 0 and its count, as for tiny texts, ``DEFAULT_DISCOUNT`` takes its place: a
    discount of zero would leave no probability for unseen tokens.
    """
    n = np.bincount(np.minimum(counts, NUM_DISCOUNTS + 2), minlength=NUM_DISCOUNTS + 2).astype(float)
    discounts = np.full(NUM_DISCOUNTS + 1, DEFAULT_DISCOUNT)
    discounts[0] = 0.0
    if n[1] > 0 and n[2] > 0:
        y = n[1] / (n[1] + 2 * n[2])
        for count in range(1, NUM_DISCOUNTS + 1):
            estimate = count - (count + 1) * y * n[count + 1] / n[count] if n[count] > 0 else 0.0
            if 0 < estimate < count:
                discounts[count] = estimate
    return discounts
