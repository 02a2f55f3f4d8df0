"""Options of commands that score candidates."""

from __future__ import annotations

import argparse

from smlp.errors import UserError
from smlp.text.tokenizer import NEWLINES


def add_scoring_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--newline``, ``--fill-prefix`` and ``--batch-tokens``."""
    parser.add_argument(
        "--newline", choices=NEWLINES, default="eos", help="what a line break becomes (default: </s>, as in training)"
    )
    parser.add_argument(
        "--fill-prefix", action="store_true", help="sMLP-partial: put </s> before prompts shorter than its prefix"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=8192, metavar="N", help="positions in a batch (default: %(default)s)"
    )


def add_skip_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--skip-too-long``."""
    parser.add_argument(
        "--skip-too-long", action="store_true", help="leave out, and count, records that the context cannot hold"
    )


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Checks options that are numbers.

    Args:
        args: of the command.
        **least: the smallest value of each option.

    Raises:
        UserError: one is smaller.
    """
    for option, smallest in least.items():
        value = getattr(args, option)
        if value is not None and value < smallest:
            raise UserError(f"--{option.replace('_', '-')} must be at least {smallest}, got {value}")
