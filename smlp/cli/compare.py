"""``smlp compare``: models at equal FLOPs on the same tokens, from one file to tables and figures."""

from __future__ import annotations

import argparse
from typing import Any

from smlp.cli.compare_options import add_experiment, experiment_and_folder
from smlp.cli.compare_report import EPILOG as REPORT_EPILOG
from smlp.cli.compare_report import add_report_options, run_report

HELP = "compare models at equal FLOPs: train, score, report"
RUN_HELP = "train and score what is not done yet"
STATUS_HELP = "how far the runs are"
REPORT_HELP = "tables and figures from the folder of the runs"
EPILOG = """examples:
  smlp compare run examples/compare/quick.yaml --dry-run
  smlp compare run examples/compare/quick.yaml
  smlp compare status examples/compare/quick.yaml
  smlp compare report examples/compare/quick.yaml

An experiment is one YAML file (docs/compare.md). Its runs go to runs/compare/NAME, or to --out. "run" goes on where it
was, whatever has stopped it; a run that fails does not stop the others.
"""
_RAW = argparse.RawDescriptionHelpFormatter


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand with its own."""
    parser = subparsers.add_parser("compare", help=HELP, description=HELP, epilog=EPILOG, formatter_class=_RAW)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    run_parser = actions.add_parser(
        "run",
        help=RUN_HELP,
        description=RUN_HELP,
        epilog="example:\n  smlp compare run examples/compare/quick.yaml --dry-run\n\n"
        "exit status: 0 all runs are done, or their jobs submitted, 1 one failed, 75 stopped by a signal (the same\n"
        "command goes on)",
        formatter_class=_RAW,
    )
    add_experiment(run_parser)
    run_parser.add_argument(
        "--dry-run", action="store_true", help="train nothing; print models, FLOPs, runs, time and disk"
    )
    run_parser.add_argument(
        "--only", choices=("scores",), help="train nothing; score what is trained (a job on a cluster does it)"
    )
    run_parser.set_defaults(action_of=_run)

    status_parser = actions.add_parser(
        "status",
        help=STATUS_HELP,
        description=STATUS_HELP,
        epilog="example:\n  smlp compare status examples/compare/quick.yaml --json status.json",
        formatter_class=_RAW,
    )
    add_experiment(status_parser)
    status_parser.add_argument("--json", metavar="FILE", help="also write it here")
    status_parser.set_defaults(action_of=_status)
    report_parser = actions.add_parser(
        "report",
        help=REPORT_HELP,
        description=REPORT_HELP,
        epilog=REPORT_EPILOG,
        formatter_class=_RAW,
    )
    add_report_options(report_parser)
    report_parser.set_defaults(action_of=run_report)
    return parser


def run(args: argparse.Namespace) -> int:
    """Does the action."""
    return args.action_of(args)


def _run(args: argparse.Namespace) -> int:
    from smlp.cli.compare_dry_run import dry_run
    from smlp.cli.compare_run import run_experiment

    path, out = experiment_and_folder(args.experiment, args.out)
    return dry_run(path, out) if args.dry_run else run_experiment(path, out, only_scores=args.only == "scores")


def _status(args: argparse.Namespace) -> int:
    from smlp.cli.compare_status import print_status

    return print_status(experiment_and_folder(args.experiment, args.out)[1], args.json)
