"""Means and intervals over samples, and differences between models that have the same samples.

Samples are seeds, or the rounds of a timer. They pair: models of one seed saw the same tokens in the same order, and
those of one round were timed one after the other, so that their difference varies less than each of them. All intervals
are Student's t, 95 %, two-sided; with one sample there is none.
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
    """A number for each seed or round, and what they say together."""

    samples: Mapping[int, float]

    @property
    def count(self) -> int:
        """Seeds or rounds."""
        return len(self.samples)

    @property
    def mean(self) -> float:
        """Arithmetic."""
        return statistics.fmean(self.samples.values())

    @property
    def half(self) -> float | None:
        """Half the width of the interval, t * s / sqrt(n); None with one sample."""
        if self.count < 2:
            return None
        return t_quantile(self.count - 1) * statistics.stdev(self.samples.values()) / math.sqrt(self.count)

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


def estimate(samples: Mapping[int, float | None]) -> Estimate | None:
    """Of those that are finite numbers; None where none is."""
    found = {name: value for name, value in samples.items() if value is not None and math.isfinite(value)}
    return Estimate(found) if found else None


def relative_difference(
    first: Mapping[int, float | None], second: Mapping[int, float | None]
) -> tuple[Estimate, Estimate] | None:
    """How much larger the first is than the second, by the seeds or rounds that both have.

    Args:
        first, second: positive numbers by seed or round; those that are not finite are left out.

    Returns:
        differences of logarithms, whose interval is Student's; and the same as shares, first / second - 1.
        None where nothing is common to both.
    """
    logs = {
        name: math.log(first[name]) - math.log(second[name])
        for name in first
        if 0 < (first[name] or 0) < math.inf and 0 < (second.get(name) or 0) < math.inf
    }
    if not logs:
        return None
    return Estimate(logs), Estimate({name: math.expm1(value) for name, value in logs.items()})
