"""``smlp finetune``: fine-tune an encoder over a grid with several seeds, and report medians."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from smlp.cli.numbers import MOST_PROCESSES, MOST_SIZE, real, whole
from smlp.errors import UserError
from smlp.files import check_folder

if TYPE_CHECKING:
    from smlp.experiments.finetuning import Finetuning

DESCRIPTION = """fine-tune an encoder on a task over a grid, with several seeds; report the medians

Every run is one of 'smlp train'. The best point of the grid is chosen by the median over seeds of its validation after
the last update. Defaults are Table 9 of the gMLP paper: learning rates 1e-5, 2e-5 and 3e-5, batches of 16 and 32,
5 epochs, 128 tokens; on SQuAD 5e-5, 32, 8,000 updates, 512 tokens."""
EPILOG = """examples:
  smlp finetune checkpoints/amlp/checkpoint_last.pt data/mnli --out runs/finetune/amlp-mnli --dry-run
  smlp finetune checkpoints/amlp/checkpoint_last.pt data/mnli --out runs/finetune/amlp-mnli --jobs 2
  smlp finetune checkpoints/amlp/checkpoint_last.pt data/pairs --metric accuracy --out runs/finetune/pairs \\
      --lr 1e-4 3e-4 --batch-size 16 --epochs 3 --seeds 1 2 3

OUT gets results.json, results.md and a folder for each run. The same command resumes interrupted runs; finished runs
are kept, and more points or seeds can be added: name the old ones as well, for the results are of those named.

exit status: 0 all runs are done, 1 one failed, 75 stopped by a signal, 130 by Ctrl-C (the same command
resumes)
"""
#: options of fairseq-train that the command decides itself
_OWN = (
    *("--lr", "--batch-size", "--max-sentences", "--seed", "--max-update", "--max-epoch", "--total-num-update"),
    *("--warmup-updates", "--save-dir", "--restore-file", "--finetune-from-model", "--arch", "-a", "--task"),
    *("--criterion", "--optimizer", "--lr-scheduler", "--dropout", "--attention-dropout", "--weight-decay"),
    *("--log-file", "--log-format", "--valid-subset", "--max-positions", "--cpu", "--disable-validation"),
    *("--update-freq", "--max-tokens", "--required-batch-size-multiple"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="of an encoder")
    parser.add_argument("data", type=Path, metavar="DATA", help="folder that smlp data glue or smlp data squad made")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for runs and results")
    parser.add_argument("--metric", help="for files of one's own: accuracy, mcc, acc_and_f1 or pearson_and_spearman")
    grid = parser.add_argument_group("grid and seeds")
    grid.add_argument("--lr", type=float, nargs="+", metavar="LR", help="learning rates")
    grid.add_argument("--batch-size", type=int, nargs="+", metavar="B", help="batch sizes")
    grid.add_argument("--seeds", type=int, nargs="+", metavar="N", default=[1, 2, 3, 4, 5], help="default: 1 2 3 4 5")
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--epochs", **whole(), metavar="N", help="not for SQuAD")
    recipe.add_argument("--updates", **whole(), metavar="N", help="instead of --epochs")
    recipe.add_argument("--max-positions", **whole(4, MOST_SIZE), metavar="N", help="tokens of a sample")
    recipe.add_argument(
        "--warmup", **real(0, 1, below=True), metavar="SHARE", help="of the updates (default: 0.1, on SQuAD 0.125)"
    )
    rates = {"metavar": "P", "default": 0.1, "help": "default: %(default)s"}
    recipe.add_argument("--dropout", **real(0, 1, below=True), **rates)
    recipe.add_argument("--attention-dropout", **real(0, 1, below=True), **rates)
    recipe.add_argument("--weight-decay", **real(0, 1), metavar="X", default=0.01, help="default: %(default)s")
    recipe.add_argument(
        "--train-options", metavar="WORDS", default="", help="more options of fairseq-train: --train-options=--bf16"
    )
    running = parser.add_argument_group("running")
    running.add_argument(
        "--jobs", **whole(1, MOST_PROCESSES), default=1, metavar="N", help="runs at a time (default: 1)"
    )
    running.add_argument("--threads", **whole(1, MOST_PROCESSES), metavar="N", help="threads of each run")
    running.add_argument("--cpu", action="store_true", help="use no GPU")
    running.add_argument(
        "--keep-checkpoints",
        action="store_true",
        help="keep the checkpoints of finished runs, which are removed otherwise",
    )
    running.add_argument("--dry-run", action="store_true", help="train nothing; print the runs and the first command")


def run(args: argparse.Namespace) -> int:
    """Do the runs that are not done yet and write the results; return the exit status."""
    from smlp.experiments.finetuning import print_plan, run_finetuning
    from smlp.experiments.folder import Folder
    from smlp.experiments.medians import page, write_results
    from smlp.experiments.processes import stopped_by

    plan, folder = plan_of(args), Folder(args.out)
    if args.dry_run:
        print_plan(plan, folder)
        return 0
    with folder.locked("smlp finetune"):
        stopped, failed = run_finetuning(plan, folder, args.jobs, args.threads)
        results = write_results(plan, folder)
    if stopped is not None:
        return stopped_by(stopped)
    print(f"\n{page(results)}\n{args.out / 'results.md'}, {args.out / 'results.json'}")
    for message in failed:
        print(f"failed: {message}")
    return 1 if failed else 0


def plan_of(args: argparse.Namespace) -> Finetuning:
    """Return the plan that the options describe.

    Raises:
        UserError: an option, the checkpoint or the data are wrong.
    """
    from smlp.experiments.finetuning import GLUE_METRICS, Finetuning, read_data, read_encoder
    from smlp.fairseq_compat.command_line import training_configuration
    from smlp.fairseq_compat.limits import MOST_SEED

    if args.metric is not None and args.metric not in GLUE_METRICS:
        raise UserError(f"--metric {args.metric!r} is not one of {', '.join(GLUE_METRICS)}")
    check_folder(args.out, "--out", "runs and results")
    words = _train_options(args.train_options)
    data = read_data(args.data, args.metric)
    encoder = read_encoder(args.checkpoint, data, "--other-dictionary" in words)
    if args.epochs is not None and (args.updates is not None or data.is_squad):
        raise UserError("--epochs: SQuAD takes --updates" if data.is_squad else "give --epochs or --updates, not both")
    updates = args.updates if args.updates is not None else 8000 if data.is_squad else None
    context = encoder.config.max_tokens
    if args.max_positions is not None and args.max_positions > context:
        raise UserError(f"--max-positions {args.max_positions}: {args.checkpoint} has a context of {context} tokens")
    recipe = {
        "max_positions": args.max_positions or min(context, 512 if data.is_squad else 128),
        "dropout": args.dropout,
        "attention_dropout": args.attention_dropout if encoder.has_attention else None,
        "weight_decay": args.weight_decay,
    }
    plan = Finetuning(
        encoder,
        data,
        tuple(_distinct("--lr", args.lr or ([5e-5] if data.is_squad else [1e-5, 2e-5, 3e-5]), 0, 10)),
        tuple(_distinct("--batch-size", args.batch_size or ([32] if data.is_squad else [16, 32]), 1, MOST_SIZE)),
        tuple(_distinct("--seeds", args.seeds, 0, MOST_SEED)),
        None if updates is not None else args.epochs or 5,
        updates,
        args.warmup if args.warmup is not None else 0.125 if data.is_squad else 0.1,
        recipe,
        words,
        args.cpu,
        args.keep_checkpoints,
    )
    training_configuration(plan.words(plan.runs()[0], args.out))
    return plan


def _train_options(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--train-options {text!r}: {error}") from None
    for word in words:
        if word.partition("=")[0] in _OWN:
            raise UserError(f"--train-options {word}: smlp finetune sets this itself")
        if word in ("-h", "--help"):
            raise UserError(f"--train-options {word} prints help and trains nothing: leave it out")
        if word.partition("=")[0] in ("--patience", "--stop-time-hours", "--stop-min-lr"):
            raise UserError(f"--train-options {word}: a run of smlp finetune has a set number of updates")
    return words


def _distinct(option: str, values: list[float], least: float, most: float) -> list[float]:
    for value in values:
        if not least <= value <= most or (option == "--lr" and value == 0):  # also refuses NaN
            raise UserError(
                f"{option} must be {'above' if option == '--lr' else 'at least'} {least} and at most {most:,}, "
                f"got {value}"
            )
    if len(set(values)) < len(values):
        raise UserError(f"{option} {' '.join(map(str, values))}: a value is given twice")
    return values
