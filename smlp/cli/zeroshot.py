"""``smlp zeroshot``: zero-shot and few-shot priming on the paper's six tasks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smlp.cli.json_file import STDOUT, check_not_read, check_outputs, remove_outputs, write_json, write_json_lines
from smlp.cli.numbers import whole
from smlp.cli.options import (
    add_model_options,
    add_scoring_options,
    add_spread_option,
    add_team_options,
    as_team,
    load_model,
)
from smlp.cli.progress import RecordsProgress
from smlp.errors import UserError
from smlp.evaluation.zeroshot.readers import READERS
from smlp.evaluation.zeroshot.rules import RULES
from smlp.evaluation.zeroshot.templates import TEMPLATES
from smlp.launch.team import Team

if TYPE_CHECKING:
    from smlp.evaluation.zeroshot.evaluate import Task
    from smlp.evaluation.zeroshot.partial import PartialScores
    from smlp.inference.language_model import LanguageModel

DESCRIPTION = "accuracy on COPA, PIQA, StoryCloze, Winogrande, HellaSwag and ReCoRD"
EPILOG = """examples:
  smlp zeroshot --path checkpoint_best.pt --tasks all --data-dir tasks --skip-too-long
  smlp zeroshot --path checkpoint_best.pt --tasks copa,piqa --data-dir tasks --output answers.jsonl --json report.json
  smlp zeroshot --path checkpoint_best.pt --tasks hellaswag --data-dir tasks --num-fewshot 4 --nproc 2
  srun --ntasks=16 smlp zeroshot --path checkpoint_best.pt --tasks all --data-dir tasks

The data directory holds the official files, in a folder for each task (copa/val.jsonl, piqa/valid.jsonl, ...) or side
by side; docs/zeroshot.md says where each comes from, what the model reads and how candidates are scored.
"""
_TASKS, _TEMPLATES, _SCORING = tuple(READERS), tuple(TEMPLATES), ("auto", *RULES)
_NOT_PRINTED = ("model", "data_dir", "skip_too_long", "batch_tokens")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model_options(parser)
    parser.add_argument("--tasks", required=True, help=f"comma-separated names: {', '.join(_TASKS)}; or all")
    parser.add_argument("--data-dir", required=True, type=Path, help="folder of the tasks' official files")
    parser.add_argument("--split", help="another split of a single task instead of its usual one")
    parser.add_argument("--templates", choices=_TEMPLATES, default="fair", help="prompts (default: %(default)s)")
    parser.add_argument(
        "--scoring",
        choices=_SCORING,
        default="auto",
        help="rule that determines accuracy (default: the templates' own)",
    )
    parser.add_argument(
        "--limit",
        **whole(),
        metavar="N",
        help="only the first N records of each task's file, which is not a random sample",
    )
    parser.add_argument("--num-fewshot", **whole(0), default=0, metavar="K", help="solved examples before each record")
    parser.add_argument("--fewshot-seed", type=int, metavar="N", help="seed for drawing them (default: 1)")
    add_scoring_options(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write every record with its candidates' scores, as JSONL ('-' for standard output); until then, scores "
        "are kept in FILE.partial, from which the same command resumes",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report here too")
    add_team_options(parser)
    add_spread_option(parser)


def run(args: argparse.Namespace) -> int:
    """Score the tasks and print the report."""
    names = check(args)
    check_tasks_kept(args.data_dir, output=args.output, json=args.json)
    check_outputs(output=args.output, json=args.json)
    _check_not_kept(args)
    return as_team(args, lambda team: _evaluate(args, names, team))


def _check_not_kept(args: argparse.Namespace) -> None:
    """Refuse to write the report over the file of partial scores, which is removed at the end."""
    from smlp.evaluation.zeroshot.partial import partial_path

    if args.output and args.json and partial_path(args.output).resolve() == Path(args.json).resolve():
        raise UserError(f"--json {args.json} is where the scores of --output are kept: name another one")


def check_tasks_kept(data_dir: Path, **paths: str | None) -> None:
    """Run :func:`smlp.cli.json_file.check_not_read` for the files of the tasks in a folder."""
    files = (path for reader in READERS.values() for path in reader.files(data_dir))
    check_not_read(files, "a file of a task in --data-dir", **paths)


def check(args: argparse.Namespace) -> list[str]:
    """Return the tasks that the options ask for.

    Raises:
        UserError: options do not go together, or a task is unknown.
    """
    names = task_names(args.tasks)
    if args.split is not None and len(names) > 1:
        raise UserError(f"--split {args.split} is for a single task, but {len(names)} are given: {', '.join(names)}")
    if args.fewshot_seed is not None and not args.num_fewshot:
        raise UserError(f"--fewshot-seed {args.fewshot_seed} would not be used: it draws the examples of --num-fewshot")
    args.fewshot_seed = 1 if args.fewshot_seed is None else args.fewshot_seed
    return names


def task_names(text: str) -> list[str]:
    """Return the names of tasks in a list with commas, each once.

    Raises:
        UserError: a name is unknown.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ["all"]:
        return list(_TASKS)
    unknown = [name for name in names if name not in _TASKS]
    if unknown or not names:
        raise UserError(f"--tasks {text}: choose from {', '.join(_TASKS)}, or all")
    return names


def _evaluate(args: argparse.Namespace, names: list[str], team: Team) -> int:
    from smlp.evaluation.zeroshot.evaluate import Protocol, answer_task, for_each_task, read_task
    from smlp.evaluation.zeroshot.report import average, json_rows, summarise, table, table_6
    from smlp.inference.scoring.candidates import CandidateScorer, drop_nothing

    protocol = Protocol(
        args.templates, args.scoring, args.split, args.limit, args.num_fewshot, args.fewshot_seed, args.skip_too_long
    )
    model = load_model(args, team)
    drop_nothing(model.decoder)
    config = model.decoder.config
    encoding = model.encoding(args.newline, args.fill_prefix)
    tasks = list(for_each_task(names, lambda name: read_task(name, args.data_dir, protocol, encoding)).values())
    scorer = CandidateScorer(model.decoder)
    prefix = model.vocabulary.symbols[model.start_token]
    settings = {
        "model": str(args.path),
        "templates": args.templates,
        "scoring": args.scoring,
        "num_fewshot": args.num_fewshot,
        "fewshot_seed": args.fewshot_seed,
        "prefix": prefix,
        "newline": args.newline,
        "fill_prefix": args.fill_prefix,
        "max_tokens": config.max_tokens,
        "is_leaky": config.is_leaky,
        "data_dir": str(args.data_dir),
        "limit": args.limit,
        "skip_too_long": args.skip_too_long,
        "batch_tokens": args.batch_tokens,
        "dtype": args.dtype,
        "spread_experts": args.spread_experts,
    }
    kept = _kept_scores(args, settings, model, tasks, team)
    if team.is_first:
        remove_outputs(args.output, args.json)
    summaries, rows = {}, []
    progress = RecordsProgress(sum(len(task.prepared.examples) for task in tasks), team.is_first)
    for task in tasks:
        count = progress.of(task.name, 0 if kept is None else kept.num_records(task.name))
        answers = answer_task(task, scorer, args.batch_tokens, team, count, kept)
        summaries[task.name] = summarise(task, answers, config.prefix_tokens)
        if team.is_first and args.output:
            rows += json_rows(task, answers, prefix, model.vocabulary.symbols)
    if not team.is_first:
        return 0
    if args.output:
        write_json_lines("--output", args.output, rows)
    write_json(args.json, {"settings": settings, "tasks": summaries, "average": average(summaries)})
    described = ", ".join(f"{name} {value}" for name, value in settings.items() if name not in _NOT_PRINTED)
    shown = sys.stderr if args.output in STDOUT else sys.stdout
    print(f"{args.path}: {described}\n\n{table(summaries)}\n\n{table_6(summaries, Path(args.path).name)}", file=shown)
    if args.output:
        print(f"\n{len(rows)} records in {args.output}", file=shown)
    if kept is not None:
        kept.remove()
    return 0


def _kept_scores(
    args: argparse.Namespace, settings: dict[str, Any], model: LanguageModel, tasks: list[Task], team: Team
) -> PartialScores | None:
    """Return the scores of an interrupted run with the same output; None without an output, or to a stream."""
    from smlp.evaluation.zeroshot.partial import PartialScores, digest_of, partial_path, weights_digest
    from smlp.inference.scoring.batching import PLANNER

    if not args.output or args.output in STDOUT or (Path(args.output).exists() and not Path(args.output).is_file()):
        return None
    pins, weights = {}, weights_digest(model.decoder) if team.is_first or args.spread_experts else None
    if args.spread_experts:
        weights = digest_of(team.gather(weights))
    if team.is_first:
        pins = {
            **{name: value for name, value in settings.items() if name not in ("model", "data_dir")},
            "device": model.decoder.embedding.weight.device.type,
            "planner": PLANNER,
            f"weights over {team.size} ranks" if args.spread_experts else "weights": weights,
            **{f"records of {task.name}": digest_of(task.prepared.parts()) for task in tasks},
        }
    kept = PartialScores(partial_path(args.output), pins, team)
    if team.is_first and kept.num_batches:
        print(f"{kept.path}: {kept.num_batches} batches are scored already", file=sys.stderr)
    return kept
