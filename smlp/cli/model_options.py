"""Options of commands that load a checkpoint as a plain model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from smlp.launch.team import Team

if TYPE_CHECKING:
    from smlp.inference.language_model import LanguageModel


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--path``, and what :func:`add_model_files` adds."""
    parser.add_argument("--path", required=True, help="checkpoint, in one file or in parts, or an export")
    add_model_files(parser)


def add_model_files(parser: argparse.ArgumentParser) -> None:
    """Adds ``--dict``, ``--tokenizer`` and ``--device``, for commands that name the checkpoint otherwise."""
    parser.add_argument("--dict", help="dict.txt, if it is not found")
    add_tokenizer_option(parser)
    parser.add_argument("--device", help="torch device (default: a GPU where there is one)")


def add_tokenizer_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--tokenizer``."""
    parser.add_argument(
        *("--tokenizer", "--sentencepiece-model"),
        metavar="FILE",
        help="SentencePiece model, or encoder.json with vocab.bpe beside it, if it is not found",
    )


def load_model(args: argparse.Namespace, team: Team | None = None) -> LanguageModel:
    """The model that the options name, in evaluation mode on its device.

    Raises:
        UserError: a file is missing or damaged, or there is no such device.
    """
    from smlp.checkpoint.load import load_pretrained

    device = (team or Team()).device(args.device)
    return load_pretrained(args.path, args.dict, args.tokenizer).to(device)
