"""Means and intervals over seeds, and differences between models that were trained with the same seeds.

Seeds pair: models of one seed saw the same tokens in the same order, so that their difference varies less than each of
them. All intervals are Student's t, 95 %, two-sided; with one seed there is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from smlp.errors import UserError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number for each seed, and what they say together."""

    by_seed: Mapping[int, float]

    @property
    def count(self) -> int:
        """Seeds."""
        return len(self.by_seed)

    @property
    def mean(self) -> float:
        """Arithmetic."""
        return statistics.fmean(self.by_seed.values())

    @property
    def half(self) -> float | None:
        """Half the width of the interval, t * s / sqrt(n); None with one seed."""
        if self.count < 2:
            return None
        return t_quantile(self.count - 1) * statistics.stdev(self.by_seed.values()) / math.sqrt(self.count)

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.half is None else self.mean + self.half


def t_quantile(degrees: int) -> float:
    """The point that Student's t with so many degrees of freedom exceeds in 2.5 % of all cases."""
    try:
        from scipy.special import stdtrit
    except ImportError as error:
        raise UserError('intervals need scipy: pip install "smlp[plots]"') from error

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def estimate(by_seed: Mapping[int, float | None]) -> Estimate | None:
    """Of the seeds that have a finite number; None where none has."""
    found = {seed: value for seed, value in by_seed.items() if value is not None and math.isfinite(value)}
    return Estimate(found) if found else None


def relative_difference(
    first: Mapping[int, float | None], second: Mapping[int, float | None]
) -> tuple[Estimate, Estimate] | None:
    """How much larger the first is than the second, by the seeds that both have.

    Args:
        first, second: positive numbers by seed.

    Returns:
        differences of logarithms, whose interval is Student's; and the same as shares, first / second - 1, by seed.
        None without a common seed.
    """
    logs = {
        seed: math.log(first[seed]) - math.log(second[seed])
        for seed in first
        if (first[seed] or 0) > 0 and (second.get(seed) or 0) > 0
    }
    if not logs:
        return None
    return Estimate(logs), Estimate({seed: math.expm1(value) for seed, value in logs.items()})
