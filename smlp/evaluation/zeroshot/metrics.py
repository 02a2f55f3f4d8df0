"""Accuracy with its uncertainty, and ReCoRD's exact match and F1."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable

#: of the normal distribution: 95 % lie within
_Z = 1.959963984540054


def standard_error(share: float, count: int) -> float:
    """Of a share of ``count`` records: ``sqrt(p (1 - p) / (n - 1))``; NaN for fewer than two."""
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else math.nan


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval (1927), which is one also where all or none are right; NaN without records."""
    if count == 0:
        return math.nan, math.nan
    weight = _Z**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = _Z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def normalised_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces, as the official script of SQuAD and ReCoRD has it."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1 if the prediction is one of the answers, both normalised, else 0."""
    return float(any(normalised_answer(prediction) == normalised_answer(answer) for answer in answers))


def best_f1(prediction: str, answers: Iterable[str]) -> float:
    """Harmonic mean of precision and recall of words, with the answer that it is highest with."""
    return max(_f1(normalised_answer(prediction).split(), normalised_answer(answer).split()) for answer in answers)


def _f1(predicted: list[str], wanted: list[str]) -> float:
    shared = (Counter(predicted) & Counter(wanted)).total()
    if not shared:
        return 0.0
    return 2 * shared / (len(predicted) + len(wanted))
