"""The command that starts this package again, or a module of it."""

from __future__ import annotations

import sys


def this_program() -> list[str]:
    """Return ``python -m smlp`` for the package that is running.

    A folder of that name in the current directory counts only if it did for this process.
    """
    return this_module("smlp")


def this_module(name: str) -> list[str]:
    """Return ``python -m NAME``, as :func:`this_program` does."""
    by_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    return [sys.executable, *([] if by_module else ["-P"]), "-m", name]
