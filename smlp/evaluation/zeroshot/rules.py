"""Scores of a record's candidates, from the log-probabilities of their tokens, and the candidate that is chosen.

Letters: ``L`` tokens of a candidate's text, context and continuation; ``f`` of the first one that is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from smlp.inference.scoring.texts import common_prefix


@dataclass(frozen=True)
class ScoredText:
    """A candidate's text as a model sees it."""

    #: ids, (L,), what stands before every text left out
    tokens: tuple[int, ...]
    #: natural log-probability of each from the first that is scored on, (L - f,), float64
    log_probs: np.ndarray
    #: how many of them are of the context
    num_context: int
    #: characters of the candidate alone
    num_chars: int
    #: log-probability of the candidate without its context; None where it was not asked for
    unconditional: float | None = None

    def since(self, place: int) -> np.ndarray:
        """Log-probabilities of the tokens from a place on, as far as they are scored."""
        first = len(self.tokens) - len(self.log_probs)
        return self.log_probs[max(place - first, 0) :]

    @property
    def continuation(self) -> float:
        """Log-probability of the continuation, given the context."""
        return float(self.since(self.num_context).sum())


def common_suffix(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all sequences end with alike."""
    return common_prefix([sequence[::-1] for sequence in sequences])


def _sum(texts: Sequence[ScoredText]) -> list[float]:
    return [float(text.log_probs.sum()) for text in texts]


def _mean(texts: Sequence[ScoredText]) -> list[float]:
    shared = common_prefix([text.tokens for text in texts])
    # a text that is the beginning of another has nothing of its own: its last token speaks for it
    return [float(text.since(min(shared, len(text.tokens) - 1)).mean()) for text in texts]


def _suffix(texts: Sequence[ScoredText]) -> list[float]:
    shared = common_suffix([text.tokens for text in texts])
    if shared == 0:  # nothing follows the candidates: all that is left is what they are worth themselves
        return _sum(texts)
    return [float(text.since(len(text.tokens) - shared).sum()) for text in texts]


def _continuation(texts: Sequence[ScoredText]) -> list[float]:
    return [text.continuation for text in texts]


def _tokens(texts: Sequence[ScoredText]) -> list[float]:
    return [float(text.since(text.num_context).mean()) for text in texts]


def _chars(texts: Sequence[ScoredText]) -> list[float]:
    return [text.continuation / max(text.num_chars, 1) for text in texts]


def _unconditional(texts: Sequence[ScoredText]) -> list[float]:
    return [text.continuation - text.unconditional for text in texts]


#: ``sum``: of the whole text, less the beginning that all share, which adds the same to each. ``mean``: over tokens
#: after that beginning. ``suffix``: sum over the end that they share. ``continuation``: sum of the continuation.
#: ``tokens``: that by its tokens. ``chars``: that by characters of the candidate. ``unconditional``: that less the
#: candidate's log-probability without its context
RULES: dict[str, Callable[[Sequence[ScoredText]], list[float]]] = {
    "sum": _sum,
    "mean": _mean,
    "suffix": _suffix,
    "continuation": _continuation,
    "tokens": _tokens,
    "chars": _chars,
    "unconditional": _unconditional,
}


def headline_rule(task: str, templates: str) -> str:
    """The rule that a task's accuracy is told by: that of the templates' authors.

    Artetxe et al. average after the beginning that all candidates share; GPT-3's paper compares "the per-token
    likelihood (to normalize for length)" of the completion (section 2.4); the harness sums.
    """
    if templates != "fair":
        return {"gpt3": "tokens", "lm-eval": "continuation"}[templates]
    return "suffix" if task == "winogrande" else "mean"


def scores(rule: str, texts: Sequence[ScoredText]) -> list[float]:
    """One score for each candidate; more is better.

    Raises:
        FloatingPointError: a score is NaN or infinite.
    """
    found = RULES[rule](texts)
    if not np.isfinite(found).all():
        raise FloatingPointError(f"scores of the candidates are {found}")
    return found


def choice(found: Sequence[float]) -> int:
    """The candidate with the highest score; the first one among equals."""
    return int(np.argmax(found))
