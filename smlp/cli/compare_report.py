"""``smlp compare report``: its options, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path

from smlp.cli.compare_options import add_experiment, experiment_and_folder

EPILOG = """examples:
  smlp compare report examples/compare/quick.yaml
  smlp compare report runs/compare/quick --to docs/results/quick --baseline gMLP

Runs that failed, are missing or half done are named, and the others reported. Drawing needs matplotlib:
pip install "smlp[plots]". What is in the report: docs/compare.md.
"""


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Declares EXPERIMENT, --out, --to and --baseline."""
    add_experiment(parser)
    parser.add_argument(
        "--to", metavar="DIR", type=Path, help="folder for the report (default: report, beside the runs)"
    )
    parser.add_argument(
        "--baseline",
        metavar="MODEL",
        action="append",
        default=[],
        help="hold all models against this one, seed by seed; may be given again (default: the first dense "
        "Transformer and the first gMLP)",
    )


def run_report(args: argparse.Namespace) -> int:
    """Writes the report and says where it is, and which runs are not in it.

    Raises:
        UserError: see :func:`smlp.experiments.report.write.write_report`.
    """
    from smlp.experiments.report.runs import read_experiment
    from smlp.experiments.report.state import incomplete
    from smlp.experiments.report.write import write_report

    _, out = experiment_and_folder(args.experiment, args.out)
    page = write_report(out, args.to, args.baseline)
    experiment = read_experiment(out)
    done = sum(run.is_done for run in experiment.runs)
    print(f"{done} of {len(experiment.runs)} runs of {len(experiment.models)} models are finished")
    for run, reason in incomplete(experiment):
        print(f"  {run.name} ({run.state}, {run.last_update} of {experiment.updates} updates): {reason}")
    print(f"report: {page}")
    return 0
