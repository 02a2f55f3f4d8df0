"""``smlp generate``: continues prompts with a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smlp.cli.generate_options import DEFAULT_BATCH, add_generation_options, check_options, writer_of
from smlp.cli.model_options import add_model_options, load_model

if TYPE_CHECKING:
    from smlp.inference.generation import Continuation, TextWriter

HELP = "continue prompts with a trained model"
EPILOG = """examples:
  smlp generate --path checkpoints/checkpoint_best.pt --prompt "And it came to pass" --top-p 0.9
  smlp generate --path checkpoints/checkpoint_best.pt --file prompts.txt --greedy --max-tokens 40
  smlp generate --path checkpoints/checkpoint_best.pt --file prompts.txt --num-return 4 --stop . --output texts.jsonl
  smlp generate --path checkpoints/checkpoint_best.pt --prompt "The module" --beam 5 --num-return 5
  smlp generate --path checkpoints/checkpoint_best.pt --interactive --temperature 0.8

dict.txt and the tokenizer are looked for beside the checkpoint, then with the data it was trained on; an export
(smlp checkpoint merge) brings its own.
A single text is written to standard output as it is made; of several, each has a line, where " / " stands for a line
end. --output keeps ids, log-probabilities and why each text ended. Beam search finds what fairseq-generate finds.
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "generate", help=HELP, description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    add_generation_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Writes the continuations."""
    check_options(args)
    if args.output not in (None, "-"):
        from smlp.cli.json_file import check_output

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


def _writer(args: argparse.Namespace) -> TextWriter:
    from smlp.inference.scoring.candidates import drop_nothing

    model = load_model(args)
    drop_nothing(model.decoder)
    return writer_of(args, model)


def _say_what_is_cut(writer: TextWriter, prompts: Sequence[str]) -> None:
    if writer.limits.when_full != "slide":
        return
    tokens = [writer.prompt_tokens(prompt) for prompt in prompts]
    cut = [(number, count) for number, count in enumerate(writer.num_cut(tokens)) if count]
    if not cut:
        return
    number, count = max(cut, key=lambda pair: pair[1])
    which = "the prompt" if len(prompts) == 1 else f"{len(cut)} of {len(prompts)} prompts, at most prompt {number + 1}:"
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
    from smlp.cli.json_file import json_lines

    # made first: a prompt that does not fit is refused before the file is touched
    texts = writer.continuations(prompts, batch_size)
    settings = {"path": args.path, **writer.settings()}
    num_texts, num_tokens, start = 0, 0, time.perf_counter()
    with json_lines("--output", args.output) as write:
        for found in texts:
            for continuation in found:
                write(_record(continuation, settings))
                num_texts, num_tokens = num_texts + 1, num_tokens + len(continuation.tokens)
    seconds = time.perf_counter() - start
    if args.output != "-":
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
    from smlp.errors import UserError
    from smlp.files import read_bytes

    try:
        data = sys.stdin.buffer.read() if path == "-" else read_bytes(path)
    except OSError as error:
        raise UserError(f"cannot read prompts from {path}: {error.strerror}") from None
    try:
        lines = data.decode("utf-8").removesuffix("\n").split("\n") if data else []
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path} is not UTF-8 text: line {line}, byte {error.start}") from None
    if not lines:
        raise UserError(f"{path} holds no prompt: 0 lines")
    return lines
