"""Which experiment an action of ``smlp compare`` is about."""

from __future__ import annotations

import argparse
from pathlib import Path

from smlp.errors import UserError


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """Declares EXPERIMENT and --out."""
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="YAML file, or the folder of its runs")
    parser.add_argument("--out", type=Path, help="folder of its runs (default: runs/compare/NAME)")


def experiment_and_folder(given: Path, out: Path | None) -> tuple[Path, Path]:
    """The file of an experiment and the folder of its runs, from either of them.

    Raises:
        UserError: there is neither.
    """
    if given.is_dir():
        if not (given / "experiment.yaml").is_file():
            raise UserError(f"{given} is no folder of smlp compare: there is no experiment.yaml in it")
        if out is not None:
            raise UserError(f"{given} is the folder of the runs already: leave --out out")
        return given / "experiment.yaml", given
    if not given.is_file():
        raise UserError(f"there is no experiment {given}")
    return given, out or Path("runs") / "compare" / given.stem
