"""``smlp eval-lm``: perplexity of a checkpoint on binarised data or on a text file."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, NoReturn

from smlp.cli.json_file import check_outputs, remove_outputs, write_json, write_json_lines
from smlp.cli.numbers import whole
from smlp.cli.options import add_model_options, add_team_options, as_team
from smlp.cli.progress import BatchesProgress
from smlp.errors import UserError
from smlp.evaluation.choices import BREAK_MODES, DOCUMENTS

if TYPE_CHECKING:
    from smlp.cli.eval_data import EvaluationText
    from smlp.evaluation.samples import Samples
    from smlp.evaluation.scoring import Scores
    from smlp.inference.language_model import LanguageModel
    from smlp.launch.team import Team

DESCRIPTION = "perplexity of a checkpoint: per token, per word, and bits per byte"
EPILOG = """examples:
  smlp eval-lm data-bin --path checkpoints/checkpoint_best.pt --gen-subset valid
  smlp eval-lm data-bin --path checkpoints/checkpoint_best.pt --text valid.txt --gen-subset valid --context-window 64
  smlp eval-lm --text book.txt --path checkpoints/checkpoint_best.pt --per-document chapters.jsonl
  smlp eval-lm data-bin --path checkpoints/checkpoint_best.pt --parity

Options that fairseq-eval-lm has too mean the same there, and the loss is the same. What this command lacks:
  fairseq-eval-lm --user-dir $(smlp user-dir) DATA --path CHECKPOINT ...
"""
#: default tokens of a batch: more do not fit into a CPU's caches, fewer leave a GPU idle
CPU_MAX_TOKENS, GPU_MAX_TOKENS = 2**12, 2**15
#: tokens that ``--parity`` scores by default
PARITY_TOKENS = 2**14


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options, with fairseq's names if fairseq has them."""
    add_model_options(parser)
    add_team_options(parser)
    parser.add_argument("data", nargs="?", metavar="DATA", help="folder of fairseq-preprocess, mmap format")
    text = parser.add_argument_group("text")
    text.add_argument("--gen-subset", default="test", metavar="NAME", help="split of DATA (default: %(default)s)")
    text.add_argument(
        "--text",
        metavar="FILE",
        help="text that the split was made of, whose words and bytes count; without DATA: the text to score",
    )
    text.add_argument(
        "--limit-tokens", **whole(), metavar="N", help="only the first samples, until they hold so many tokens"
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
    for name, choices in (("sample_break_mode", BREAK_MODES), ("document", DOCUMENTS)):
        if getattr(args, name) not in choices:
            raise UserError(f"{_option(name)} must be one of {', '.join(choices)}, got {getattr(args, name)!r}")
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


def _is_rank() -> bool:
    from smlp.launch.ranks import has_terminal, place_of

    return place_of(os.environ, is_interactive=has_terminal()) is not None


def _work(args: argparse.Namespace, team: Team) -> int:
    from smlp.cli.eval_data import load_model_for, read_text

    model = load_model_for(args, team)
    text = read_text(args, model)
    samples = _samples(args, model, text)
    if args.parity:
        return _compare(args, model, text, samples, team)
    return _evaluate(args, model, text, samples, team)


def _samples(args: argparse.Namespace, model: LanguageModel, text: EvaluationText) -> Samples:
    from smlp.evaluation.samples import Cutting, cut
    from smlp.text.tokenizer import Vocabulary

    config = model.decoder.config
    if args.tokens_per_sample is None:
        args.tokens_per_sample = config.max_tokens - int(model.start_token != Vocabulary.eos)
    cutting = Cutting(
        max_tokens=config.max_tokens,
        tokens_per_sample=args.tokens_per_sample,
        break_mode=args.sample_break_mode,
        context_window=args.context_window,
        prefix=config.prefix_tokens,
        start_token=model.start_token,
    )
    samples = cut(text.stream.tokens, text.stream.lengths, cutting)
    limit = args.limit_tokens or (PARITY_TOKENS if args.parity else None)
    if limit is not None:
        samples = samples.up_to(limit)
    if not samples.num_scored:
        raise UserError(
            f"no token of {text.name} can be scored: {len(text.stream.tokens)} tokens in {len(samples)} samples, of "
            f"which the first {config.prefix_tokens} positions are not scored, in a context of {config.max_tokens}"
        )
    return samples


def _compare(args: argparse.Namespace, model: LanguageModel, text: EvaluationText, samples: Samples, team: Team) -> int:
    from smlp.cli.eval_report import print_parity
    from smlp.evaluation.parity import compare

    if team.is_first:
        remove_outputs(args.json)
    parity = compare(model.decoder, samples, len(text.stream.tokens), team)
    if team.is_first:
        if args.json:
            write_json(
                args.json,
                {"checkpoint": args.path, "text": text.name, "tokens": samples.num_scored, **parity.to_plain()},
            )
        print_parity(f"{samples.num_scored:,} tokens of {text.name}", parity)
        parity.check()
    return 0


def _evaluate(
    args: argparse.Namespace, model: LanguageModel, text: EvaluationText, samples: Samples, team: Team
) -> int:
    from smlp.evaluation.scoring import score_samples
    from smlp.inference.scoring.capacity import limit_places, routers_with_places

    if args.eval_capacity_factor is not None:
        if not routers_with_places(model.decoder):
            raise UserError(f"--eval-capacity-factor: no expert of {args.path} has limited places, in training neither")
        limit_places(model.decoder, args.eval_capacity_factor)
    max_tokens = args.max_tokens
    if max_tokens is None and args.batch_size is None:
        is_cpu = model.decoder.embedding.weight.device.type == "cpu"
        max_tokens = CPU_MAX_TOKENS if is_cpu else GPU_MAX_TOKENS
    batches = samples.batches(args.batch_size, max_tokens)
    if team.is_first:
        remove_outputs(args.json, args.per_document)
    start = time.perf_counter()
    progress = BatchesProgress(-(-len(batches) // team.size), team.size) if team.is_first else None
    scores = score_samples(model.decoder, samples, batches, len(text.stream.tokens), team, seen=progress)
    seconds = time.perf_counter() - start
    if team.is_first:
        _report(args, model, text, scores, seconds)
    return 0


def _report(
    args: argparse.Namespace, model: LanguageModel, text: EvaluationText, scores: Scores, seconds: float
) -> None:
    import numpy as np

    from smlp.cli.eval_report import notes_of, print_evaluation
    from smlp.evaluation.report import Evaluation, figures
    from smlp.evaluation.text_sizes import decoded_sizes, documents_of

    sizes = text.original
    if sizes is None or np.isnan(scores.log_probs_N).any():
        sizes = decoded_sizes(text.stream, model.tokenizer)
    evaluation = Evaluation(text.stream, scores.log_probs_N, sizes)
    notes = [*text.notes, *notes_of(model.decoder.config, evaluation, scores.choices, text.original is not None)]
    if args.json:
        result = {
            "checkpoint": args.path,
            "text": text.name,
            "sample_break_mode": args.sample_break_mode,
            "tokens_per_sample": args.tokens_per_sample,
            "context_window": args.context_window,
            **figures(evaluation.total),
            "words_and_bytes_of": "original text" if evaluation.sizes.of_original else "decoded tokens",
            "tokens_not_scored": int((~evaluation.is_scored_N).sum()),
            "unknown_share": evaluation.unknown_share,
            "dropped_share": scores.choices.dropped_share,
            "seconds": seconds,
            "tokens_per_second": evaluation.total.num_tokens / seconds,
            "notes": notes,
        }
        write_json(args.json, result)
    if args.per_document:
        documents = evaluation.documents(documents_of(evaluation.stream, args.document), model.tokenizer)
        write_json_lines("--per-document", args.per_document, documents)
    print_evaluation(text.name, evaluation, seconds, notes)
