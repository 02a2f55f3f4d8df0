"""Options of ``smlp generate``, and what they ask for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from smlp.cli.scoring_options import check_least

if TYPE_CHECKING:
    from smlp.inference.generation import TextWriter
    from smlp.inference.language_model import LanguageModel

DEFAULT_TOKENS = 60
DEFAULT_BATCH = 16
#: options that are handed on by their names, where they are given
SETTINGS = ("greedy", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "beam", "length_penalty")


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Adds everything but the options of the model; what is not given is None, so that it can be told apart."""
    source = parser.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue; may be empty")
    source.add_argument("--file", help="file with one prompt a line ('-' for standard input)")
    source.add_argument("--interactive", action="store_true", help="ask for prompts at the terminal; /help tells more")

    length = parser.add_argument_group("when a text ends")
    length.add_argument(
        *("--max-tokens", "--tokens"), type=int, default=DEFAULT_TOKENS, help="most new tokens (default: %(default)s)"
    )
    length.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text, which is not written; may be given again; \\n is a line end",
    )
    length.add_argument("--stop-at-eos", action="store_true", help="end at </s> instead of going on on the next line")
    length.add_argument("--min-tokens", type=int, default=0, help="with --beam or --stop-at-eos: least new tokens")
    length.add_argument(
        "--when-full",
        choices=("refuse", "stop", "slide"),
        help="where a text needs more than the model's context: refuse it before anything is written (default), stop "
        "there, or forget the earlier half and go on (of a prompt that is longer, the beginning is not read)",
    )
    length.add_argument("--slide", action="store_true", help="the same as --when-full slide")
    length.add_argument(
        "--fill-prefix", action="store_true", help="sMLP-partial: put </s> before prompts shorter than its prefix"
    )

    drawing = parser.add_argument_group("sampling")
    drawing.add_argument("--greedy", action="store_true", default=None, help="always take the likeliest token")
    drawing.add_argument("--temperature", type=float, help="below 1 safer, above wilder; 0 is --greedy (default: 1)")
    drawing.add_argument("--top-k", type=int, help="draw from the k likeliest tokens only (default: 0, all)")
    drawing.add_argument("--top-p", type=float, help="draw from the likeliest tokens that make up p (default: 1, all)")
    drawing.add_argument(
        "--repetition-penalty", type=float, help="above 1: make tokens that the text has already less likely"
    )
    drawing.add_argument("--seed", type=int, help="the same seed writes the same text (default: 1)")

    search = parser.add_argument_group("beam search")
    search.add_argument("--beam", type=int, metavar="K", help="search with K hypotheses instead of drawing")
    search.add_argument(
        "--length-penalty", type=float, help="rank by log-probability / length ** this; above 1: longer (default: 1)"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--num-return", type=int, default=1, metavar="N", help="texts for each prompt (default: 1)")
    output.add_argument("--batch-size", type=int, help=f"prompts at a time (default: {DEFAULT_BATCH})")
    output.add_argument(
        "--output", metavar="FILE", help="write JSON lines, one for each text, there ('-' for standard output)"
    )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of sampling or beam search that were given, by name."""
    return {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}


def check_options(args: argparse.Namespace) -> None:
    """Refuses options that have no meaning together, before a model is loaded.

    Raises:
        UserError: it names them.
    """
    from smlp.errors import UserError

    check_least(args, batch_size=1)
    if args.slide and args.when_full not in (None, "slide"):
        raise UserError(f"--slide does not go with --when-full {args.when_full}")
    if args.interactive:
        alone = {"--output": args.output, "--beam": args.beam, "--batch-size": args.batch_size}
        taken = [option for option, value in alone.items() if value is not None]
        taken += ["--num-return"] if args.num_return != 1 else []
        if taken:
            raise UserError(f"--interactive writes one text at a time as it is drawn: leave out {', '.join(taken)}")


def when_full(args: argparse.Namespace) -> str:
    """What to do at the end of the context; an answer at the terminal is never refused."""
    if args.slide:
        return "slide"
    return args.when_full or ("stop" if args.interactive else "refuse")


def writer_of(args: argparse.Namespace, model: LanguageModel) -> TextWriter:
    """What the options ask for.

    Raises:
        UserError: a value is out of range, or options do not go with each other.
    """
    return model.writer(
        args.max_tokens,
        stop=[stop.replace("\\n", "\n") for stop in args.stop or ()],
        stop_at_eos=args.stop_at_eos,
        min_tokens=args.min_tokens,
        when_full=when_full(args),
        num_return=args.num_return,
        fill_prefix=args.fill_prefix,
        **given_settings(args),
    )
