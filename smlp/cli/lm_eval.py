"""``smlp lm-eval``: any task of lm-evaluation-harness on a checkpoint."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from smlp.cli.json_file import STDOUT, check_outputs, remove_outputs, write_json, write_json_lines
from smlp.cli.numbers import whole
from smlp.cli.options import add_model_options, add_scoring_options, add_team_options, as_team, load_model
from smlp.cli.zeroshot import check_tasks_kept
from smlp.errors import UserError
from smlp.launch.team import Team

DESCRIPTION = "tasks of lm-evaluation-harness"
EPILOG = """examples:
  smlp lm-eval --path checkpoint_best.pt --tasks copa,hellaswag --data-dir tasks --skip-too-long
  smlp lm-eval --path checkpoint_best.pt --tasks lambada_openai,wikitext --json results.json
  smlp lm-eval --path checkpoint_best.pt --tasks mine --include-path my_tasks
  python -m smlp.evaluation.lm_eval run --model smlp --model_args path=checkpoint_best.pt --tasks lambada_openai

The last one is the harness's own command line.

Needs the extra lm-eval (pip install -e '.[lm-eval]'). With --data-dir, the six tasks of smlp zeroshot are read from
their official files there, with the harness's prompts and rules, and nothing is fetched from the network.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model_options(parser)
    parser.add_argument(
        "--tasks", required=True, help="comma-separated names; lm-eval ls tasks lists the harness's own"
    )
    parser.add_argument("--data-dir", type=Path, help="official files of the six tasks of smlp zeroshot")
    parser.add_argument("--include-path", type=Path, help="folder with more tasks (YAML, which can run Python)")
    parser.add_argument(
        "--limit", **whole(), metavar="N", help="only the first N records of each task, which is not a random sample"
    )
    parser.add_argument(
        "--num-fewshot", **whole(0), metavar="K", help="solved examples (default: the task's own number)"
    )
    add_scoring_options(parser)
    parser.add_argument(
        "--output", metavar="FILE", help="write every record with its answers, as JSONL ('-' for standard output)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    add_team_options(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate the tasks and print the harness's table."""
    names = list(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    if not names:
        raise UserError("--tasks names no task")
    for option in ("data_dir", "include_path"):
        folder = getattr(args, option)
        if folder is not None and not folder.is_dir():
            raise UserError(f"--{option.replace('_', '-')} {folder} is not a folder")
    if args.data_dir is not None:
        check_tasks_kept(args.data_dir, output=args.output, json=args.json)
    check_outputs(output=args.output, json=args.json)
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UserError(f"smlp lm-eval needs lm-evaluation-harness ({error}): pip install -e '.[lm-eval]'") from None
    return as_team(args, lambda team: _evaluate(args, names, team))


def _evaluate(args: argparse.Namespace, names: list[str], team: Team) -> int:
    from lm_eval.utils import make_table

    from smlp.evaluation.lm_eval.evaluate import evaluate
    from smlp.evaluation.lm_eval.model import HarnessModel

    model = HarnessModel(
        load_model(args, team),
        batch_tokens=args.batch_tokens,
        newline=args.newline,
        fill_prefix=args.fill_prefix,
        team=team,
    )
    if team.is_first:
        model.begins = lambda: remove_outputs(args.output, args.json)
    found = evaluate(model, names, args.data_dir, args.include_path, args.num_fewshot, args.limit, args.skip_too_long)
    if found is None:
        return 0
    samples = found.pop("samples")
    rows = [
        {"task": task, **sample}
        for task, answered in samples.items()
        for sample in sorted(answered, key=lambda sample: sample["doc_id"])
    ]
    if args.output:
        write_json_lines("--output", args.output, rows)
    settings = {
        "model": str(args.path),
        "prefix": model.lm.vocabulary.symbols[model.lm.start_token],
        "newline": args.newline,
        "fill_prefix": args.fill_prefix,
        "max_tokens": model.max_length,
        "num_fewshot": args.num_fewshot,
        "limit": args.limit,
        "skip_too_long": args.skip_too_long,
        "dtype": args.dtype,
        "num_skipped": found["num_skipped"],
        "num_repeated": found["num_repeated"],
        "num_truncated": found["num_truncated"],
        "num_partly_scored": found["num_partly_scored"],
        "num_without_token": found["num_without_token"],
    }
    write_json(args.json, {"settings": settings, "results": found["results"], "versions": found["versions"]})
    say = functools.partial(print, file=sys.stderr if args.output in STDOUT else sys.stdout)
    say(make_table(found))
    for count, what in (
        (found["num_truncated"], "records had their context cut on the left"),
        (
            found["num_partly_scored"],
            "records have continuations that begin within the model's prefix, where nothing is scored",
        ),
        (found["num_without_token"], "continuations add no token to their context: their log-probability is 0"),
    ):
        if count:
            say(f"{count} {what}")
    for counts, what in (
        (found["num_skipped"], "are left out: the model's context cannot hold them"),
        (found["num_repeated"], "appear in the file again with the same id and are counted once"),
    ):
        for task, count in counts.items():
            say(f"{task}: {count} records {what}")
    if args.output:
        say(f"{len(rows)} records in {args.output}")
    return 0
