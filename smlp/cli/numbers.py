"""Numeric options with bounds: declared with the option, and checked when the command line is read."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from smlp.errors import UserError

MOST = (1 << 31) - 1  # limit of counts
MOST_SIZE = 1 << 24  # limit of a model dimension: torch can handle the product of two
MOST_BYTES = 1 << 40
MOST_SEED = (1 << 64) - 1  # torch's limit
MOST_SECONDS = 1e6
MOST_PROCESSES = 1024  # limit on one machine


def whole(least: int = 1, most: int = MOST) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a whole number from ``least`` to ``most``."""
    return {"type": int, "action": partial(_Bounded, least=least, most=most)}


def real(least: float, most: float, above: bool = False, below: bool = False) -> dict[str, Any]:
    """Return the same for any number from ``least`` to ``most``; ``above`` and ``below`` exclude the bound itself."""
    return {"type": float, "action": partial(_Bounded, least=least, most=most, above=above, below=below)}


class _Bounded(argparse.Action):
    def __init__(self, *args: Any, least: float, most: float, above: bool = False, below: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._least, self._most, self._above, self._below = least, most, above, below

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, value: Any, option_string: str | None = None
    ) -> None:
        if not (value > self._least if self._above else value >= self._least):  # also refuses NaN
            raise UserError(
                f"{option_string} must be {'above' if self._above else 'at least'} {self._least:,}, got {value}"
            )
        if not (value < self._most if self._below else value <= self._most):
            raise UserError(
                f"{option_string} must be {'below' if self._below else 'at most'} {self._most:,}, got {value}"
            )
        setattr(namespace, self.dest, value)
