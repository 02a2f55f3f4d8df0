"""``smlp generate``: continues prompts with a trained model."""

from __future__ import annotations

import argparse
import sys

from smlp.cli.model_options import add_model_options, load_model

HELP = "continue prompts with a trained model"
EPILOG = """examples:
  smlp generate --path checkpoints/checkpoint_best.pt --prompt "And it came to pass" --top-p 0.9
  smlp generate --path checkpoints/checkpoint_best.pt --file prompts.txt --greedy --tokens 40

dict.txt and sentencepiece.model are looked for beside the checkpoint, then with the data it was trained on; an export
(smlp checkpoint merge) brings its own.
Text is written to standard output as it is made; after a --file, one line for each prompt of the file.
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "generate", help=HELP, description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="text to continue; may be empty")
    prompts.add_argument("--file", help="file with one prompt a line ('-' for standard input)")
    parser.add_argument("--tokens", type=int, default=60, help="how many tokens to write (default: %(default)s)")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--temperature", type=float, default=1.0, help="below 1 safer, above wilder; 0 is --greedy")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens only (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens that make up p")
    parser.add_argument(
        "--fill-prefix", action="store_true", help="sMLP-partial: put </s> before prompts shorter than its prefix"
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed writes the same text (default: %(default)s)")
    parser.add_argument("--slide", action="store_true", help="past the context, forget the earlier half and go on")
    return parser


def run(args: argparse.Namespace) -> int:
    """Writes the continuations."""
    from smlp.errors import UserError
    from smlp.generation import Sampling

    if args.tokens < 1:
        raise UserError(f"--tokens must be at least 1, got {args.tokens}")
    sampling = Sampling(
        temperature=0.0 if args.greedy else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        slide=args.slide,
    )
    prompts = [args.prompt] if args.prompt is not None else _read_prompts(args.file)
    model = load_model(args)
    # All streams are made before the first is read, so that a prompt that is too long stops nothing half-way.
    streams = [model.stream(prompt, args.tokens, sampling, args.fill_prefix) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        sys.stdout.write(prompt)
        for piece in stream:
            # a file's prompts and their continuations stay on one line each
            sys.stdout.write(piece if args.file is None else piece.replace("\n", " / "))
            sys.stdout.flush()
        sys.stdout.write("\n")
    return 0


def _read_prompts(path: str) -> list[str]:
    from smlp.errors import UserError

    try:
        data = sys.stdin.buffer.read() if path == "-" else open(path, "rb").read()  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot read prompts from {path}: {error.strerror}") from None
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path} is not UTF-8 text: line {line}, byte {error.start}") from None
    if not lines:
        raise UserError(f"{path} holds no prompt: 0 lines")
    return lines
