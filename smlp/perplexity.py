"""Perplexities of mean losses, those of models that have diverged too."""

from __future__ import annotations

import math

#: a loss above so many bits has no finite perplexity: a float would hold some more, but not sums of a few of them
_MOST_BITS = 1000.0


def of_nats(loss: float) -> float:
    """e^loss, or infinity; NaN of NaN."""
    return math.inf if loss > _MOST_BITS * math.log(2) else math.exp(loss)


def of_bits(loss: float) -> float:
    """2^loss, or infinity; NaN of NaN."""
    return math.inf if loss > _MOST_BITS else 2.0**loss
