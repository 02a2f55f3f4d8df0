"""``smlp eval-lm``: perplexity of a checkpoint on binarised data or on a text file."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from smlp.cli.json_file import STDOUT, check_not_read, check_outputs, remove_outputs, write_json, write_json_lines
from smlp.cli.numbers import whole
from smlp.cli.options import add_model_options, add_spread_option, add_team_options, as_team
from smlp.cli.progress import BatchesProgress
from smlp.config.model import MOST_CAPACITY_FACTOR
from smlp.errors import UserError
from smlp.evaluation import BREAK_MODES, DOCUMENTS

if TYPE_CHECKING:
    from smlp.cli.eval_data import EvaluationText
    from smlp.config import ModelConfig
    from smlp.evaluation.parity import Parity
    from smlp.evaluation.report import Evaluation
    from smlp.evaluation.samples import Samples
    from smlp.evaluation.scoring import Choices, Scores
    from smlp.inference.language_model import LanguageModel
    from smlp.launch.team import Team

DESCRIPTION = "perplexity of a checkpoint: per token, per word, and bits per byte"
EPILOG = """examples:
  smlp eval-lm data-bin --path checkpoints/checkpoint_best.pt --gen-subset valid
  smlp eval-lm data-bin --path checkpoints/checkpoint_best.pt --text valid.txt --gen-subset valid --context-window 64
  smlp eval-lm --text book.txt --path checkpoints/checkpoint_best.pt --per-document chapters.jsonl
  smlp eval-lm data-bin --path checkpoints/checkpoint_best.pt --parity

Options that fairseq-eval-lm has too mean the same there, and the loss is the same. For what this command lacks, use
  fairseq-eval-lm --user-dir $(smlp user-dir) DATA --path CHECKPOINT ...
"""
#: default batch size in tokens: more would not fit into a CPU's caches, fewer would leave a GPU idle
CPU_MAX_TOKENS, GPU_MAX_TOKENS = 2**12, 2**15
#: tokens that ``--parity`` scores by default
PARITY_TOKENS = 2**14


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options, with fairseq's names if fairseq has them."""
    add_model_options(parser)
    add_team_options(parser)
    add_spread_option(parser)
    parser.add_argument("data", nargs="?", metavar="DATA", help="folder of fairseq-preprocess, mmap format")
    text = parser.add_argument_group("text")
    text.add_argument("--gen-subset", default="test", metavar="NAME", help="split of DATA (default: %(default)s)")
    text.add_argument(
        "--text",
        metavar="FILE",
        help="text that the split was made from, to count its words and bytes; without DATA, the text to score",
    )
    text.add_argument(
        "--limit-tokens", **whole(), metavar="N", help="score only the first samples, until they hold N tokens"
    )
    samples = parser.add_argument_group("samples")
    samples.add_argument("--tokens-per-sample", type=int, metavar="N", help="default: the model's context")
    samples.add_argument(
        "--context-window",
        type=int,
        default=0,
        metavar="N",
        help="also read N tokens before each sample, which is that much shorter (default: %(default)s)",
    )
    samples.add_argument(
        "--sample-break-mode",
        default="none",
        metavar="MODE",
        help="none (blocks, the default), eos (each line alone), complete (whole lines), complete_doc (whole lines, no "
        "further than an empty one)",
    )
    samples.add_argument("--batch-size", "--max-sentences", **whole(), metavar="N", help="samples of a batch")
    samples.add_argument(
        "--max-tokens",
        **whole(),
        metavar="N",
        help=f"tokens of a batch (default without --batch-size: {CPU_MAX_TOKENS} on a CPU, {GPU_MAX_TOKENS} on a GPU)",
    )
    samples.add_argument(
        "--eval-capacity-factor",
        type=float,
        metavar="F",
        help="Switch, GShard: an expert's capacity in units of k*N/E; 0 drops nothing (default: as in the checkpoint)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="also write the result here")
    output.add_argument(
        "--per-document", metavar="FILE", help="write a line of JSON for each document ('-' for standard output)"
    )
    output.add_argument(
        "--document", default="empty-line", metavar="KIND", help="what ends a document: empty-line (default) or line"
    )
    output.add_argument(
        "--parity",
        action="store_true",
        help="compare only the losses of {dropless, capacity} x {batch 1, 8} x {1, 2 ranks} on the first "
        f"{PARITY_TOKENS} tokens (or --limit-tokens); status 1 if dropless ones differ",
    )


def refuse(message: str) -> NoReturn:
    """Refuse unknown options."""
    raise UserError(
        f"{message}; options that only fairseq has are for: fairseq-eval-lm --user-dir $(smlp user-dir) DATA --path ..."
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, on one rank or several."""
    check_options(args)
    if args.parity and args.nproc is None and not _is_rank():
        args.nproc = 2
    return as_team(args, lambda team: _work(args, team))


def check_options(args: argparse.Namespace) -> None:
    """Refuse values that make no sense, before anything is loaded.

    Raises:
        UserError: the message names the option.
    """
    if args.data is None and args.text is None:
        raise UserError("nothing to evaluate: give a folder of binarised data, or a text file with --text")
    if args.data is None and args.gen_subset != "test":
        raise UserError(f"--gen-subset {args.gen_subset} would not be used: it is a split of DATA, which is not given")
    for name, choices in (("sample_break_mode", BREAK_MODES), ("document", DOCUMENTS)):
        if getattr(args, name) not in choices:
            raise UserError(f"{_option(name)} must be one of {', '.join(choices)}, got {getattr(args, name)!r}")
    factor = args.eval_capacity_factor
    if factor is not None and not 0 <= factor <= MOST_CAPACITY_FACTOR:
        most = f"{MOST_CAPACITY_FACTOR:,}"
        raise UserError(f"--eval-capacity-factor must be at least 0 and at most {most}, got {factor}")
    folders = args.data.split(":") if args.data else []
    manifests = (os.path.join(folder, "manifest.json") for folder in folders)
    check_not_read([args.text, *manifests], json=args.json, per_document=args.per_document)
    check_outputs(json=args.json, per_document=args.per_document)
    if args.parity and args.nproc == 1:
        raise UserError("--parity compares one rank with several: leave --nproc 1 out")
    if args.parity:
        if args.dtype != "fp32":
            raise UserError(f"--parity compares losses to 8 digits, in fp32: leave --dtype {args.dtype} out")
        for name in ("batch_size", "max_tokens", "eval_capacity_factor", "per_document"):
            if getattr(args, name) is not None:
                raise UserError(f"--parity is a separate comparison: leave {_option(name)} out")
    if args.parity and args.spread_experts:
        raise UserError("--parity compares spread experts with others: leave --spread-experts out")
    if args.document != "empty-line" and args.per_document is None:
        raise UserError("--document needs --per-document, which names the file to write")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_rank() -> bool:
    from smlp.launch.ranks import has_terminal, place_of

    return place_of(os.environ, is_interactive=has_terminal()) is not None


def _work(args: argparse.Namespace, team: Team) -> int:
    from smlp.cli.eval_data import load_model_for, read_text

    model = load_model_for(args, team)
    text = read_text(args, model)
    samples, reasons = _samples(args, model, text)
    if args.parity:
        return _compare(args, model, text, samples, team)
    return _evaluate(args, model, text, samples, reasons, team)


def _samples(args: argparse.Namespace, model: LanguageModel, text: EvaluationText) -> tuple[Samples, list[str]]:
    """Return the samples, and why tokens are in none of them or not scored."""
    from dataclasses import replace

    from smlp.evaluation.samples import Cutting, cut

    cutting = Cutting.in_blocks(model.decoder.config, model.start_token)
    if args.tokens_per_sample is None:
        args.tokens_per_sample = cutting.tokens_per_sample
    cutting = replace(
        cutting,
        tokens_per_sample=args.tokens_per_sample,
        break_mode=args.sample_break_mode,
        context_window=args.context_window,
    )
    found = samples = cut(text.stream.tokens, text.stream.lengths, cutting)
    limit = args.limit_tokens or (PARITY_TOKENS if args.parity else None)
    if limit is not None:
        samples = found.up_to(limit)
    if not samples.num_scored:
        raise UserError(
            f"no token of {text.name} can be scored: {len(text.stream.tokens)} tokens in {len(samples)} samples, of "
            f"which the first {cutting.prefix} positions are not scored, in a context of {cutting.max_tokens}"
        )
    reasons, prefix, room = [], cutting.prefix, cutting.max_tokens - cutting.has_start
    if num_left_out := len(text.stream.tokens) - int((found.places_M >= 0).sum()):
        or_empty = " or empty ones" if args.sample_break_mode == "complete_doc" else ""
        reasons.append(f"{num_left_out:,} are in lines longer than the context of {room}{or_empty}")
    if len(samples) < len(found):
        reasons.append(f"--limit-tokens {limit} ends the text")
    in_blocks = cutting.break_mode == "none"  # only before blocks is there always room for context
    if prefix and in_blocks and args.context_window >= prefix:
        reasons.append(f"the first {prefix} positions of the text choose experts")
    elif prefix:
        reasons.append(f"the first {prefix} positions of each input choose experts")
        if in_blocks and prefix < room:
            options = f"--context-window {prefix}"
            if prefix >= cutting.tokens_per_sample:  # what a start symbol alone leaves to score
                options += f" and --tokens-per-sample above {prefix}"
            reasons[-1] += f"; with {options} all tokens but at most the first {prefix} of the text are scored"
    return samples, reasons


def _compare(args: argparse.Namespace, model: LanguageModel, text: EvaluationText, samples: Samples, team: Team) -> int:
    from smlp.evaluation.parity import compare

    if team.is_first:
        remove_outputs(args.json)
    parity = compare(model.decoder, samples, len(text.stream.tokens), team)
    if team.is_first:
        write_json(
            args.json,
            {"checkpoint": args.path, "text": text.name, "tokens": samples.num_scored, **parity.to_plain()},
        )
        print_parity(f"{samples.num_scored:,} tokens of {text.name}", parity)
        parity.check()
    return 0


def _evaluate(
    args: argparse.Namespace,
    model: LanguageModel,
    text: EvaluationText,
    samples: Samples,
    reasons: list[str],
    team: Team,
) -> int:
    from smlp.evaluation.scoring import score_samples
    from smlp.inference.scoring.candidates import capacity_limits, is_spread, limit_capacity

    if args.eval_capacity_factor is not None:
        if not capacity_limits(model.decoder):
            raise UserError(f"--eval-capacity-factor: no expert of {args.path} has a capacity limit")
        limit_capacity(model.decoder, args.eval_capacity_factor)
    max_tokens = args.max_tokens
    if max_tokens is None and args.batch_size is None:
        is_cpu = model.decoder.embedding.weight.device.type == "cpu"
        max_tokens = CPU_MAX_TOKENS if is_cpu else GPU_MAX_TOKENS
    batches = samples.batches(args.batch_size, max_tokens)
    if team.is_first:
        remove_outputs(args.json, args.per_document)
    start = time.perf_counter()
    progress = BatchesProgress(-(-len(batches) // team.size), team.size) if team.is_first else None
    is_in_step = is_spread(model.decoder)
    scores = score_samples(model.decoder, samples, batches, len(text.stream.tokens), team, is_in_step, progress)
    seconds = time.perf_counter() - start
    if team.is_first:
        _report(args, model, text, scores, reasons, seconds)
    return 0


def _report(
    args: argparse.Namespace,
    model: LanguageModel,
    text: EvaluationText,
    scores: Scores,
    reasons: list[str],
    seconds: float,
) -> None:
    import numpy as np

    from smlp.evaluation.report import Evaluation, decoded_sizes, documents_of, figures

    sizes = text.original
    if sizes is None or np.isnan(scores.log_probs_N).any():
        sizes = decoded_sizes(text.stream, model.tokenizer)
    evaluation = Evaluation(text.stream, scores.log_probs_N, sizes)
    notes = [
        *text.notes,
        *notes_of(model.decoder.config, evaluation, scores.choices, reasons, text.original is not None),
    ]
    total = evaluation.total
    result = {
        "checkpoint": args.path,
        "text": text.name,
        "sample_break_mode": args.sample_break_mode,
        "tokens_per_sample": args.tokens_per_sample,
        "context_window": args.context_window,
        **figures(total),
        "words_and_bytes_of": "original text" if evaluation.sizes.of_original else "decoded tokens",
        "tokens_not_scored": int((~evaluation.is_scored_N).sum()),
        "unknown_share": evaluation.unknown_share,
        "dropped_share": scores.choices.dropped_share,
        "seconds": seconds,
        "tokens_per_second": total.num_tokens / seconds,
        "notes": notes,
    }
    write_json(args.json, result)
    if args.per_document:
        documents = evaluation.documents(documents_of(evaluation.stream, args.document), model.tokenizer)
        write_json_lines("--per-document", args.per_document, documents)
    with contextlib.redirect_stdout(sys.stderr if args.per_document in STDOUT else sys.stdout):
        print_evaluation(text.name, evaluation, seconds, notes)


def notes_of(
    config: ModelConfig, evaluation: Evaluation, choices: Choices, reasons: Sequence[str], has_text: bool
) -> list[str]:
    """Return the notes that a reader needs to compare the numbers.

    Args:
        config: of the model.
        evaluation: its result.
        choices: of experts.
        reasons: why tokens are not scored.
        has_text: whether the original text was given.
    """
    from smlp.config import LEAKY_WARNING

    notes = []
    if config.is_leaky:
        notes.append(LEAKY_WARNING)
    num_unscored = int((~evaluation.is_scored_N).sum())
    if num_unscored:
        note = f"{num_unscored:,} of {len(evaluation.is_scored_N):,} tokens are not scored"
        notes.append(": ".join([note, *([", and ".join(reasons)] if reasons else [])]))
        if has_text:
            notes.append("so words and bytes are those of the decoded tokens that were scored, not of --text")
    if evaluation.unknown_share > 0:
        notes.append(
            f"{evaluation.unknown_share:.3%} of the scored tokens are <unk>, for which a model need not know what was "
            "written: numbers per word and per byte do not compare with those of other vocabularies"
        )
    if choices.num_dropped:
        notes.append(
            f"{choices.dropped_share:.2%} of the choices of experts were dropped: the loss depends on the batches, "
            "and on later tokens of a sequence; --eval-capacity-factor 0 drops none"
        )
    return notes


def print_evaluation(name: str, evaluation: Evaluation, seconds: float, notes: list[str]) -> None:
    """Print the numbers, each with its unit."""
    total = evaluation.total
    text = total.text
    source = "of the original text" if evaluation.sizes.of_original else "of the decoded tokens"
    lines = len(evaluation.stream.lengths)
    print(f"{name}: {len(evaluation.stream.tokens):,} tokens in {lines:,} lines")
    print(f"Evaluated {total.num_tokens:,} tokens in {seconds:.1f}s ({total.num_tokens / seconds:.2f} tokens/s)")
    print(f"Loss (base 2): {total.bits_per_token:.4f}, Perplexity: {total.per_token:.2f}")
    rows = [
        ("nats per token", total.nats_per_token, f"{total.num_tokens:,} tokens, {text.num_lines:,} of them </s>"),
        ("bits per token", total.bits_per_token, ""),
        ("perplexity per token", total.per_token, ""),
        ("perplexity per word", total.per_word, f"{text.num_words:,} words {source}"),
        ("perplexity per word or line end", total.per_word_or_line_end, "as is usual for WikiText"),
        ("bits per byte", total.bits_per_byte, f"{text.num_bytes:,} bytes (UTF-8) {source}, one for each line end"),
    ]
    for what, value, over in rows:
        shown = "-" if value is None else f"{value:.6g}"
        print(f"  {what:<33}{shown:>12}  {over}".rstrip())
    print(f"  {'share of <unk>':<33}{evaluation.unknown_share:>12.4%}")
    for note in notes:
        print(f"note: {note}")


def print_parity(what: str, parity: Parity) -> None:
    """Print the losses of a text as a table."""
    print(what)
    print(f"{'dropped':<28}{'ranks':>6}{'batch':>7}{'nats per token':>16}{'difference':>12}{'share':>9}")
    for cell in parity.cells:
        kind = "nothing" if cell.capacity_factor == 0 else f"what exceeds {cell.capacity_factor:g} k*N/E"
        print(
            f"{kind:<28}{cell.num_ranks:>6}{cell.batch_size:>7}{cell.loss:>16.8f}{parity.relative(cell):>12.2e}"
            f"{cell.dropped_share:>9.2%}"
        )
    for sentence in parity.left_out:
        print(f"left out: {sentence}")
