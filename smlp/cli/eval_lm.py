"""``smlp eval-lm``: perplexity of a checkpoint on binarised data or on a text file."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

from smlp.cli.eval_options import CPU_MAX_TOKENS, GPU_MAX_TOKENS, PARITY_TOKENS, add_eval_options, check_eval_options
from smlp.cli.model_options import add_model_options
from smlp.cli.team_options import add_team_options, as_team
from smlp.errors import UserError

if TYPE_CHECKING:
    from smlp.cli.eval_data import EvaluationText
    from smlp.evaluation.samples import Samples
    from smlp.evaluation.scoring import Scores
    from smlp.inference.language_model import LanguageModel
    from smlp.launch.team import Team

HELP = "perplexity of a checkpoint: per token, per word, and bits per byte"
EPILOG = """examples:
  smlp eval-lm data-bin --path checkpoints/checkpoint_best.pt --gen-subset valid
  smlp eval-lm data-bin --path checkpoints/checkpoint_best.pt --text valid.txt --gen-subset valid --context-window 64
  smlp eval-lm --text book.txt --path checkpoints/checkpoint_best.pt --per-document chapters.jsonl
  smlp eval-lm data-bin --path checkpoints/checkpoint_best.pt --parity

Options that fairseq-eval-lm has too mean the same there, and the loss is the same. What this command lacks:
  fairseq-eval-lm --user-dir $(smlp user-dir) DATA --path CHECKPOINT ...
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "eval-lm", help=HELP, description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    add_team_options(parser)
    add_eval_options(parser)
    return parser


def refuse(message: str) -> NoReturn:
    """Called for options that there are not."""
    raise UserError(
        f"{message}; options that only fairseq has are for: fairseq-eval-lm --user-dir $(smlp user-dir) DATA --path ..."
    )


def run(args: argparse.Namespace) -> int:
    """Evaluates, on one rank or several."""
    check_eval_options(args)
    if args.parity and args.nproc is None and not _is_rank():
        args.nproc = 2
    return as_team(args, lambda team: _work(args, team))


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
    from smlp.cli.json_file import remove_outputs, write_json
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
    from smlp.cli.json_file import remove_outputs
    from smlp.evaluation.scoring import score_samples
    from smlp.inference.scoring.candidates import limit_places, routers_with_places

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
    progress = _progress(team, len(batches))
    scores = score_samples(model.decoder, samples, batches, len(text.stream.tokens), team, seen=progress)
    seconds = time.perf_counter() - start
    if team.is_first:
        _report(args, model, text, scores, seconds)
    return 0


def _progress(team: Team, num_batches: int) -> Any:
    """What is called after each batch of the first rank."""
    from smlp.cli.eval_report import Progress

    return Progress(-(-num_batches // team.size), team.size) if team.is_first else None


def _report(
    args: argparse.Namespace, model: LanguageModel, text: EvaluationText, scores: Scores, seconds: float
) -> None:
    import numpy as np

    from smlp.cli.eval_report import notes_of, print_evaluation
    from smlp.cli.json_file import write_json, write_json_lines
    from smlp.evaluation.report import Evaluation, decoded_sizes, documents_of, figures

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
