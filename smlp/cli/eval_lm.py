"""``smlp eval-lm``: fairseq-eval-lm with this package loaded."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import Any

from smlp.cli.fairseq_tool import run_tool
from smlp.errors import UserError
from smlp.fairseq_compat.arguments import has_option, option_value

PASS_THROUGH = True


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    return subparsers.add_parser(
        "eval-lm",
        usage="smlp eval-lm DATA --path CHECKPOINT [any option of fairseq-eval-lm]",
        help="perplexity of a checkpoint",
        description=textwrap.fill(
            "fairseq-eval-lm with this package loaded. All arguments are handed on untouched; "
            "--tokens-per-sample, if not given, is the context that the checkpoint was trained with."
        ),
        epilog="example:\n"
        "  smlp eval-lm data-bin --path checkpoints/first/checkpoint_best.pt --gen-subset valid\n\n"
        "all options of fairseq-eval-lm:\n"
        "  fairseq-eval-lm --user-dir $(smlp user-dir) --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(args: argparse.Namespace) -> int:
    path = option_value(args.arguments, "--path")
    if path is None:
        raise UserError("no checkpoint to evaluate: give one with --path")
    added = []
    if not has_option(args.arguments, "--tokens-per-sample"):
        tokens = trained_context(path)
        if tokens is not None:
            added = ["--tokens-per-sample", str(tokens)]
            print(f"smlp eval-lm: using {' '.join(added)}, from the checkpoint", file=sys.stderr)
    return run_tool("eval_lm", [*added, *args.arguments])


def trained_context(path: str) -> int | None:
    """The ``--tokens-per-sample`` that a checkpoint was trained with; None if it cannot be read, which fairseq will
    then report."""
    import torch

    try:
        # Mapped into memory: the tensors are not read.
        cfg = torch.load(path, map_location="cpu", mmap=True)["cfg"]
        return int(cfg["task"]["tokens_per_sample"])
    except Exception:
        return None
