"""``smlp compare``: models at equal FLOPs on the same tokens, from one file to tables and figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from smlp.errors import UserError
from smlp.files import check_folder

if TYPE_CHECKING:
    from smlp.experiments.spec import Experiment

DESCRIPTION = "compare models at equal FLOPs: train, score, report"
EPILOG = """examples:
  smlp compare run examples/compare/quick.yaml --dry-run
  smlp compare run examples/compare/quick.yaml
  smlp compare status examples/compare/quick.yaml
  smlp compare report examples/compare/quick.yaml

An experiment is one YAML file (docs/compare.md). Its runs go to runs/compare/NAME, or to --out. "run" resumes after
whatever stopped it; a run that fails does not stop the others.
"""
_RUN_EPILOG = """example:
  smlp compare run examples/compare/quick.yaml --dry-run

exit status: 0 all runs are done, or their jobs submitted, 1 one failed, 75 the runs were stopped by a signal, 130
by Ctrl-C (the same command resumes)"""
_STATUS_EPILOG = """example:
  smlp compare status examples/compare/quick.yaml --json status.json

exit status: 0 all runs are done, 1 some are not."""
_REPORT_EPILOG = """examples:
  smlp compare report examples/compare/quick.yaml
  smlp compare report runs/compare/quick --to docs/results/quick --baseline gMLP

The report names runs that failed, are missing or half done, and covers the others. Drawing needs matplotlib:
pip install -e ".[plots]". docs/compare.md describes the report.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands with their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run_parser = _add_action(actions, "run", "train and score whatever is not done yet", _RUN_EPILOG, _run)
    run_parser.add_argument(
        "--dry-run", action="store_true", help="train nothing; print models, FLOPs, runs, time and disk"
    )
    run_parser.add_argument(
        "--only",
        choices=("scores",),
        help="train nothing; score the trained models (as the scoring job on a cluster does)",
    )
    status_parser = _add_action(
        actions,
        "status",
        "progress of the runs, as the last command of the folder planned them",
        _STATUS_EPILOG,
        _status,
    )
    status_parser.add_argument("--json", metavar="FILE", help="also write the result here")
    report_parser = _add_action(
        actions, "report", "tables and figures from the folder of the runs", _REPORT_EPILOG, _report
    )
    report_parser.add_argument(
        "--to", metavar="DIR", type=Path, help="folder for the report (default: report, next to the runs)"
    )
    report_parser.add_argument(
        "--baseline",
        metavar="MODEL",
        action="append",
        default=[],
        help="compare all models with this one, seed by seed; may be given again (default: the first dense "
        "Transformer and the first gMLP)",
    )


def _add_action(actions: Any, name: str, about: str, epilog: str, action_of: Any) -> argparse.ArgumentParser:
    """Add a subcommand with EXPERIMENT and ``--out``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = actions.add_parser(name, help=about, description=about, epilog=epilog, formatter_class=raw)
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="YAML file, or the folder of its runs")
    parser.add_argument("--out", type=Path, help="folder of its runs (default: runs/compare/NAME)")
    parser.add_argument(
        "--quick", action="store_true", help="apply the changes in the file's section quick; runs go to NAME-quick"
    )
    parser.set_defaults(action_of=action_of)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; return the exit status."""
    return args.action_of(args, *_file_and_folder(args.experiment, args.out, args.quick))


def _file_and_folder(given: Path, out: Path | None, is_quick: bool) -> tuple[Path, Path]:
    """Return the file of an experiment and the folder of its runs, given either of them; refuse what is neither."""
    if given.is_dir():
        if not (given / "experiment.yaml").is_file():
            raise UserError(f"{given} is not a folder of smlp compare: it has no experiment.yaml")
        if out is not None:
            raise UserError(f"{given} is the folder of the runs already: leave --out out")
        if is_quick:
            raise UserError(f"{given} is the folder of the runs, whose settings are fixed: leave --quick out")
        return given / "experiment.yaml", given
    if not given.is_file():
        raise UserError(f"there is no experiment {given}")
    if out is None and given.name == "experiment.yaml" and (given.parent / "experiment.json").is_file():
        return _file_and_folder(given.parent, None, is_quick)
    return given, out or Path("runs") / "compare" / (f"{given.stem}-quick" if is_quick else given.stem)


def _run(args: argparse.Namespace, path: Path, out: Path) -> int:
    from smlp.experiments.dry_run import dry_run
    from smlp.experiments.folder import Folder
    from smlp.experiments.reading import read_experiment
    from smlp.experiments.run import run_experiment

    experiment = read_experiment(path, args.quick)
    _check_zeroshot(experiment)
    check_folder(out, "--out", "the runs")
    if args.dry_run and args.only:
        raise UserError("--dry-run shows trainings, of which --only scores does none: give one of the two")
    if not args.dry_run:
        return run_experiment(experiment, Folder(out), only_scores=args.only == "scores")
    dry_run(experiment, Folder(out))
    return 0


def _check_zeroshot(experiment: Experiment) -> None:
    """Refuse, before anything is trained, tasks, options and files that ``smlp zeroshot`` would refuse afterwards."""
    wanted = experiment.evaluation
    if wanted.zeroshot_data is None:
        return
    from smlp.cli import zeroshot
    from smlp.evaluation.zeroshot.evaluate import for_each_task
    from smlp.evaluation.zeroshot.readers import READERS
    from smlp.experiments.spec import MASKED, option_words, zeroshot_words
    from smlp.fairseq_compat.command_line import check_left_out

    if experiment.task == MASKED:
        raise UserError(f"{experiment.path}: evaluate.zeroshot needs language models, and these are encoders")
    unknown = [task for task in wanted.zeroshot_tasks if task not in (*READERS, "all")]
    if unknown:
        raise UserError(
            f"{experiment.path}: evaluate.zeroshot.tasks has {unknown[0]!r}; there are {', '.join(READERS)}"
        )

    def refuse(message: str) -> NoReturn:
        raise UserError(message)

    parser = argparse.ArgumentParser(add_help=False)  # a help page would end this process as if all were well
    zeroshot.add_options(parser)
    parser.error = refuse
    words = [*option_words({"path": "checkpoint", "data_dir": wanted.zeroshot_data}), *zeroshot_words(wanted)]
    try:
        asked = parser.parse_args(words)
        check_left_out(parser, wanted.zeroshot_options)
        fixed = {"path": "checkpoint", "data_dir": wanted.zeroshot_data, "json": None, "output": None}
        if others := [name for name, value in fixed.items() if getattr(asked, name) != value]:
            raise UserError(f"{others[0]} may not be given: each run has its own")
        names, data = zeroshot.check(asked), wanted.zeroshot_data
        if data.is_dir():  # a dry run may be before there are tasks
            for_each_task(names, lambda name: READERS[name].read(data, asked.split))
    except UserError as error:
        raise UserError(f"{experiment.path}: evaluate.zeroshot: {error}") from None


def _status(args: argparse.Namespace, path: Path, out: Path) -> int:
    """Print the state of every run; return 0 if all are done, 1 otherwise."""
    from smlp.cli.json_file import write_json
    from smlp.experiments.folder import DONE, Folder
    from smlp.experiments.progress import duration, status

    rows = status(Folder(out))
    width = max(len(row["run"]) for row in rows)
    print(
        f"{'run':<{width}}  {'state':<8} {'updates':>15}  {'left':>10}  {'train':>9} {'valid':>9}  perplexity per token"
    )
    for row in rows:
        numbers = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("train", "valid")]
        of, message = f"{row['num_updates']:,}/{row['updates']:,}", row["message"] or ""
        left = "" if row["seconds_left"] is None else duration(row["seconds_left"])
        line = (
            f"{row['run']:<{width}}  {row['state']:<8} {of:>15}  {left:>10}  {numbers[0]:>9} {numbers[1]:>9}  {message}"
        )
        print(line.rstrip())
    states = [row["state"] for row in rows]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    write_json(args.json, rows)
    return 0 if set(states) == {DONE} else 1


def _report(args: argparse.Namespace, path: Path, out: Path) -> int:
    """Write the report, and print where it is and which runs are not in it."""
    from smlp.experiments.report.details import incomplete
    from smlp.experiments.report.results import read_results
    from smlp.experiments.report.write import write_report

    results = read_results(out)
    page = write_report(results, args.to, args.baseline)
    done = sum(run.is_done for run in results.runs)
    print(f"{done} of {len(results.runs)} runs of {len(results.models)} models are finished")
    for run, reason in incomplete(results):
        print(f"  {run.name} ({run.state}, {run.last_update} of {results.updates} updates): {reason}")
    print(f"report: {page}")
    return 0
