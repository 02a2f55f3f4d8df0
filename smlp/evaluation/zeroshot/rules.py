"""Scores of a record's candidates from the log-probabilities of their tokens, the choice, and how good the choices are.

Letters: ``L`` tokens of a candidate's text, context and continuation; ``f`` the first one that is scored.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from smlp.inference.scoring.texts import common_prefix


@dataclass(frozen=True)
class ScoredText:
    """A candidate's text as a model sees it."""

    #: ids (L,), without the symbols that precede every text
    tokens: tuple[int, ...]
    #: natural log-probability of each from the first that is scored on, (L - f,), float64
    log_probs: np.ndarray
    #: number of context tokens
    num_context: int
    #: characters of the candidate alone
    num_chars: int
    #: log-probability of the candidate without its context; None if not requested
    unconditional: float | None = None

    def since(self, place: int) -> np.ndarray:
        """Return the log-probabilities of the tokens from a place on, as far as they are scored."""
        first = len(self.tokens) - len(self.log_probs)
        return self.log_probs[max(place - first, 0) :]

    @property
    def continuation(self) -> float:
        """Return the log-probability of the continuation, given the context."""
        return float(self.since(self.num_context).sum())


def _sum(texts: Sequence[ScoredText]) -> list[float]:
    return [float(text.log_probs.sum()) for text in texts]


def _mean(texts: Sequence[ScoredText]) -> list[float]:
    shared = common_prefix([text.tokens for text in texts])
    # a text that is a prefix of another has no tokens of its own, so its last token is scored
    return [float(text.since(min(shared, len(text.tokens) - 1)).mean()) for text in texts]


def _suffix(texts: Sequence[ScoredText]) -> list[float]:
    shared = common_prefix([text.tokens[::-1] for text in texts])
    if shared == 0:  # nothing follows the candidates, so only they themselves can be scored
        return _sum(texts)
    return [float(text.since(len(text.tokens) - shared).sum()) for text in texts]


#: ``sum``: of the whole text, less a context that all share, which adds the same to each. ``mean``: over tokens after
#: the beginning that all share. ``suffix``: sum over the end that they share. ``continuation``: sum of the
#: continuation. ``tokens``: the same per token. ``chars``: the same per character of the candidate. ``unconditional``:
#: the same, less the candidate's log-probability without its context
RULES: dict[str, Callable[[Sequence[ScoredText]], list[float]]] = {
    "sum": _sum,
    "mean": _mean,
    "suffix": _suffix,
    "continuation": lambda texts: [text.continuation for text in texts],
    "tokens": lambda texts: [float(text.since(text.num_context).mean()) for text in texts],
    "chars": lambda texts: [text.continuation / max(text.num_chars, 1) for text in texts],
    "unconditional": lambda texts: [text.continuation - text.unconditional for text in texts],
}


def headline_rule(task: str, templates: str) -> str:
    """Return the rule behind a task's headline accuracy: that of the templates' authors.

    Artetxe et al. average after the beginning that all candidates share; GPT-3's paper compares "the per-token
    likelihood (to normalize for length)" of the completion (section 2.4); the harness sums.
    """
    if templates != "fair":
        return {"gpt3": "tokens", "lm-eval": "continuation"}[templates]
    return "suffix" if task == "winogrande" else "mean"


def scores(rule: str, texts: Sequence[ScoredText]) -> list[float]:
    """Return one score for each candidate; more is better.

    Raises:
        FloatingPointError: a score is NaN or infinite.
    """
    found = RULES[rule](texts)
    if not np.isfinite(found).all():
        raise FloatingPointError(f"scores of the candidates are {found}")
    return found


def choice(found: Sequence[float]) -> int:
    """Return the candidate with the highest score; the first one among equals."""
    return int(np.argmax(found))


#: 95 % of a normal distribution lie within this many standard deviations
_Z = 1.959963984540054


def standard_error(share: float, count: int) -> float:
    """Return the standard error of a share of ``count`` records, ``sqrt(p (1 - p) / (n - 1))``; NaN for fewer than
    two."""
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else math.nan


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval (1927), which also holds where all or none are right; NaN without records."""
    if count == 0:
        return math.nan, math.nan
    weight = _Z**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = _Z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def normalised_answer(text: str) -> str:
    """Return a text in lower case without punctuation, articles and extra spaces, as the official scripts of SQuAD and
    ReCoRD normalise answers."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """Return 1 if the prediction is one of the answers, both normalised, else 0."""
    return float(any(normalised_answer(prediction) == normalised_answer(answer) for answer in answers))


def best_f1(prediction: str, answers: Iterable[str]) -> float:
    """Return the harmonic mean of precision and recall of words, with the answer that gives the highest."""
    return max(_f1(normalised_answer(prediction).split(), normalised_answer(answer).split()) for answer in answers)


def _f1(predicted: list[str], wanted: list[str]) -> float:
    shared = (Counter(predicted) & Counter(wanted)).total()
    if not shared:
        return 0.0
    return 2 * shared / (len(predicted) + len(wanted))
