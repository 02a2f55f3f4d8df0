"""Exceptions that reach a user as one line."""

from __future__ import annotations

import re


class UserError(ValueError):
    """Bad input: the message is one sentence that names the field or file and the numbers.

    Commands print it as a single line and exit with status 1; Python callers catch it as a ``ValueError``.
    """


class NaNError(UserError, FloatingPointError):
    """Not-a-number where none may be: training has diverged, or the weights are damaged."""

    @classmethod
    def in_layer(cls, name: str, error: Exception) -> NaNError:
        """The error of a layer, with what to do about it."""
        return cls(f"{name}: {error}; if this is training, it has diverged: lower --lr or set --clip-norm")


class ParallelError(RuntimeError):
    """Ranks that do not fit together, or one that is gone: the message names rank, place and shapes."""

    @classmethod
    def lost(cls, where: str, error: Exception) -> ParallelError:
        """The error of a collective, without its place in the library's source and the library's advice."""
        reason = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).strip()).partition("\n")[0].split(". ")[0]
        return cls(f"{where} failed ({reason}): look for the rank that stopped first")
