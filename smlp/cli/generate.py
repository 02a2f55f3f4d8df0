"""``smlp generate``: continue prompts with a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smlp.cli.numbers import whole
from smlp.cli.options import add_model_options, load_model
from smlp.errors import UserError

if TYPE_CHECKING:
    from smlp.inference.generation import Continuation, TextWriter

DESCRIPTION = "continue prompts with a trained model"
EPILOG = """examples:
  smlp generate --path checkpoints/checkpoint_best.pt --prompt "And it came to pass" --top-p 0.9
  smlp generate --path checkpoints/checkpoint_best.pt --file prompts.txt --greedy --max-tokens 40
  smlp generate --path checkpoints/checkpoint_best.pt --file prompts.txt --num-return 4 --stop . --output texts.jsonl
  smlp generate --path checkpoints/checkpoint_best.pt --prompt "The module" --beam 5 --num-return 5
  smlp generate --path checkpoints/checkpoint_best.pt --interactive --temperature 0.8

dict.txt and the tokenizer are looked for next to the checkpoint, then with the data it was trained on; an export
(smlp checkpoint merge) brings its own.
A single text is written to standard output while it is generated; several texts are written one per line, with " / "
for a line end. --output also records ids, log-probabilities and why each text ended. Beam search finds the same texts
as fairseq-generate.
"""
DEFAULT_TOKENS = 50  # as in Python
DEFAULT_BATCH = 16
#: options that are passed on by name if given
SETTINGS = ("greedy", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "beam", "length_penalty")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options; those in ``SETTINGS`` are None if they are not given."""
    add_model_options(parser)
    source = parser.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue; may be empty")
    source.add_argument("--file", help="file with one prompt a line ('-' for standard input)")
    source.add_argument(
        "--interactive", action="store_true", help="read prompts at the terminal; /help shows the commands"
    )

    length = parser.add_argument_group("end of a text")
    length.add_argument(
        *("--max-tokens", "--tokens"),
        type=int,
        default=DEFAULT_TOKENS,
        help="maximum number of new tokens (default: %(default)s)",
    )
    length.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text, which is not written; may be given again; \\n is a line end",
    )
    length.add_argument("--stop-at-eos", action="store_true", help="end at </s> instead of continuing on the next line")
    length.add_argument(
        "--min-tokens", type=int, default=0, help="with --beam or --stop-at-eos: minimum number of new tokens"
    )
    length.add_argument(
        "--when-full",
        choices=("refuse", "stop", "slide"),
        help="if a text needs more than the model's context: refuse it before anything is written (default), stop "
        "there (default with --interactive), or forget the earlier half and continue (the beginning of a longer prompt "
        "is not read)",
    )
    length.add_argument("--slide", action="store_true", help="the same as --when-full slide")
    length.add_argument(
        "--fill-prefix",
        action="store_true",
        help="sMLP-partial: put start symbols before prompts shorter than its prefix",
    )

    drawing = parser.add_argument_group("sampling")
    drawing.add_argument("--greedy", action="store_true", default=None, help="always take the most likely token")
    drawing.add_argument(
        "--temperature", type=float, help="below 1: more conservative; above 1: more random; 0 is --greedy (default: 1)"
    )
    drawing.add_argument("--top-k", type=int, help="draw from the k most likely tokens only (default: 0, all)")
    drawing.add_argument(
        "--top-p", type=float, help="draw from the most likely tokens that make up p (default: 1, all)"
    )
    drawing.add_argument(
        "--repetition-penalty", type=float, help="above 1: make tokens that already occur in the text less likely"
    )
    drawing.add_argument("--seed", type=int, help="the same seed writes the same text (default: 1)")

    search = parser.add_argument_group("beam search")
    search.add_argument("--beam", type=int, metavar="K", help="search with K hypotheses instead of drawing")
    search.add_argument(
        "--length-penalty", type=float, help="rank by log-probability / length ** this; above 1: longer (default: 1)"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--num-return", type=int, default=1, metavar="N", help="texts for each prompt (default: 1)")
    output.add_argument("--batch-size", **whole(), help=f"prompts at a time (default: {DEFAULT_BATCH})")
    output.add_argument(
        "--output", metavar="FILE", help="write JSON lines to this file, one for each text ('-' for standard output)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the continuations."""
    check_options(args)
    if args.output not in (None, "-"):
        from smlp.cli.json_file import check_not_read, check_output

        check_not_read([args.file], output=args.output)
        check_output("--output", args.output)
    if args.interactive:
        from smlp.cli.prompt_loop import PromptLoop

        return PromptLoop(_writer(args)).run()
    prompts = [args.prompt] if args.prompt is not None else _read_prompts(args.file)
    writer = _writer(args)
    _say_what_is_cut(writer, prompts)
    batch_size = DEFAULT_BATCH if args.batch_size is None else args.batch_size
    if args.output is not None:
        _write_file(args, writer, prompts, batch_size)
    elif args.prompt is not None and args.beam is None and args.num_return == 1:
        _write_as_it_comes(writer, args.prompt)
    else:
        on_one_line = args.file is not None or args.num_return > 1
        for found in writer.continuations(prompts, batch_size):
            for continuation in found:
                text = continuation.prompt + continuation.text
                print(text.replace("\n", " / ") if on_one_line else text, flush=True)
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not go together, before a model is loaded.

    Raises:
        UserError: the message names them.
    """
    if args.slide and args.when_full not in (None, "slide"):
        raise UserError(f"--slide cannot be combined with --when-full {args.when_full}")
    if args.interactive:
        alone = {"--output": args.output, "--beam": args.beam, "--batch-size": args.batch_size}
        taken = [option for option, value in alone.items() if value is not None]
        taken += ["--num-return"] if args.num_return != 1 else []
        if taken:
            raise UserError(f"--interactive writes one text at a time as it is drawn: leave out {', '.join(taken)}")


def when_full(args: argparse.Namespace) -> str:
    """Return what to do at the end of the context: by default refuse, or stop at the terminal."""
    if args.slide:
        return "slide"
    return args.when_full or ("stop" if args.interactive else "refuse")


def _writer(args: argparse.Namespace) -> TextWriter:
    """Load the model and return the writer of the texts that the options ask for."""
    from smlp.inference.scoring.candidates import drop_nothing

    model = load_model(args)
    drop_nothing(model.decoder)
    return model.writer(
        args.max_tokens,
        stop=[stop.replace("\\n", "\n") for stop in args.stop or ()],
        stop_at_eos=args.stop_at_eos,
        min_tokens=args.min_tokens,
        when_full=when_full(args),
        num_return=args.num_return,
        fill_prefix=args.fill_prefix,
        **{name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None},
    )


def _say_what_is_cut(writer: TextWriter, prompts: Sequence[str]) -> None:
    if writer.limits.when_full != "slide":
        return
    tokens = [writer.prompt_tokens(prompt) for prompt in prompts]
    cut = [(number, count) for number, count in enumerate(writer.num_cut(tokens)) if count]
    if not cut:
        return
    number, count = max(cut, key=lambda pair: pair[1])
    which = "the prompt"
    if len(prompts) > 1:
        which = f"{len(cut)} of {len(prompts)} prompts; the longest is prompt {number + 1}"
    print(
        f"the model's context of {writer.decoder.config.max_tokens} tokens is too short for {which}: of its "
        f"{len(tokens[number])} tokens (start symbol included), the first {count} are not read",
        file=sys.stderr,
    )


def _write_as_it_comes(writer: TextWriter, prompt: str) -> None:
    texts = writer.follow([writer.prompt_tokens(prompt)])
    sys.stdout.write(prompt)
    for _, new in texts:
        sys.stdout.write(new)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _write_file(args: argparse.Namespace, writer: TextWriter, prompts: Sequence[str], batch_size: int) -> None:
    from smlp.cli.json_file import STDOUT, json_lines

    # read prompts first, so that one that does not fit is refused before the file is touched
    texts = writer.continuations(prompts, batch_size)
    settings = {"path": args.path, "dtype": args.dtype, **writer.settings()}
    num_texts, num_tokens, start = 0, 0, time.perf_counter()
    with json_lines("--output", args.output) as write:
        for found in texts:
            for continuation in found:
                write(_record(continuation, settings))
                num_texts, num_tokens = num_texts + 1, num_tokens + len(continuation.tokens)
    seconds = time.perf_counter() - start
    if args.output not in STDOUT:
        print(
            f"{args.output}: {num_texts} texts for {len(prompts)} prompts, {num_tokens:,} tokens in {seconds:.1f} s "
            f"({num_tokens / seconds:,.0f} tokens/s)"
        )


def _record(continuation: Continuation, settings: dict[str, Any]) -> dict[str, Any]:
    record = dataclasses.asdict(continuation)
    log_probs = record.pop("log_probs")
    counted = {"num_tokens": len(continuation.tokens), "log_prob": continuation.log_prob}
    return {**record, **counted, "token_log_probs": log_probs, "settings": settings}


def _read_prompts(path: str) -> list[str]:
    from smlp.files import read_bytes, text_of

    try:
        data = sys.stdin.buffer.read() if path == "-" else read_bytes(path)
    except OSError as error:
        raise UserError(f"cannot read prompts from {path}: {error.strerror}") from None
    try:
        text = text_of(data, "utf-8-sig")
        lines = text.removesuffix("\n").split("\n") if text else []
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path} is not UTF-8 text: line {line}, byte {error.start}") from None
    if not lines:
        raise UserError(f"{path} holds no prompt: 0 lines")
    return lines
