"""The options of ``smlp eval-lm`` beside those of every command that loads a model."""

from __future__ import annotations

import argparse

from smlp.cli.json_file import check_outputs
from smlp.errors import UserError
from smlp.evaluation import BREAK_MODES, DOCUMENTS

#: of a batch, unless the options say otherwise: more do not fit into a CPU's caches, fewer leave a GPU idle
CPU_MAX_TOKENS, GPU_MAX_TOKENS = 2**12, 2**15
#: that ``--parity`` scores
PARITY_TOKENS = 2**14


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """Adds DATA, and what to score, how and where the result goes; named as in fairseq where fairseq has it."""
    parser.add_argument("data", nargs="?", metavar="DATA", help="folder of fairseq-preprocess, mmap format")
    text = parser.add_argument_group("text")
    text.add_argument("--gen-subset", default="test", metavar="NAME", help="split of DATA (default: %(default)s)")
    text.add_argument(
        "--text",
        metavar="FILE",
        help="text that the split was made of, whose words and bytes count; without DATA: the text to score",
    )
    text.add_argument(
        "--limit-tokens", type=int, metavar="N", help="only the first samples, until they hold so many tokens"
    )
    samples = parser.add_argument_group("samples")
    samples.add_argument("--tokens-per-sample", type=int, metavar="N", help="default: as in training")
    samples.add_argument(
        "--context-window",
        type=int,
        default=0,
        metavar="N",
        help="feed each sample with so many tokens before it, which take room from it (default: %(default)s)",
    )
    samples.add_argument(
        "--sample-break-mode",
        default="none",
        metavar="MODE",
        help="none (blocks, the default), eos (each line alone), complete (whole lines), complete_doc (whole lines, no "
        "further than an empty one)",
    )
    samples.add_argument("--batch-size", "--max-sentences", type=int, metavar="N", help="samples of a batch")
    samples.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"tokens of a batch (default without --batch-size: {CPU_MAX_TOKENS} on a CPU, {GPU_MAX_TOKENS} on a GPU)",
    )
    samples.add_argument(
        "--eval-capacity-factor",
        type=float,
        metavar="F",
        help="Switch, GShard: places at each expert in units of k*N/E; 0 drops nothing (default: as in the checkpoint)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="also write the result here")
    output.add_argument("--per-document", metavar="FILE", help="write a line of JSON for each document")
    output.add_argument(
        "--document", default="empty-line", metavar="KIND", help="what ends a document: empty-line (default) or line"
    )
    output.add_argument(
        "--parity",
        action="store_true",
        help="instead: the loss of {dropless, capacity} x {batch 1, 8} x {1, 2 ranks} on the first "
        f"{PARITY_TOKENS} tokens (or --limit-tokens); status 1 if dropless ones differ",
    )


def check_eval_options(args: argparse.Namespace) -> None:
    """Refuses values that make no sense, before anything is loaded.

    Raises:
        UserError: the message names the option.
    """
    if args.data is None and args.text is None:
        raise UserError("nothing to evaluate: give a folder of binarised data, or a text file with --text")
    for name, choices in (("sample_break_mode", BREAK_MODES), ("document", DOCUMENTS)):
        if getattr(args, name) not in choices:
            raise UserError(f"{_option(name)} must be one of {', '.join(choices)}, got {getattr(args, name)!r}")
    for name in ("batch_size", "max_tokens", "limit_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"{_option(name)} must be at least 1, got {value}")
    factor = args.eval_capacity_factor
    if factor is not None and not 0 <= factor < float("inf"):
        raise UserError(f"--eval-capacity-factor must be at least 0, got {factor}")
    check_outputs(json=args.json, per_document=args.per_document)
    if args.parity and args.nproc == 1:
        raise UserError("--parity compares one rank with several: leave --nproc 1 out")
    if args.parity:
        for name in ("batch_size", "max_tokens", "eval_capacity_factor", "per_document"):
            if getattr(args, name) is not None:
                raise UserError(f"--parity is a comparison of its own: leave {_option(name)} out")
    if args.document != "empty-line" and args.per_document is None:
        raise UserError("--document is about --per-document, which names the file to write")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
