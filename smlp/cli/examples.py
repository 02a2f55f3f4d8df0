"""``smlp examples``: write recipes, experiments and Slurm scripts to a folder, where they can be changed and run."""

from __future__ import annotations

import argparse
import filecmp
import os
from pathlib import Path

from smlp.errors import UserError

DESCRIPTION = """write the examples and the Slurm scripts to a folder

An installed wheel has them without a clone: training recipes (examples/ARCH.sh), experiments (examples/compare),
plug-ins (examples/extend), a notebook, and scripts/slurm, which submits jobs."""
EPILOG = """examples:
  smlp examples my-runs
  bash my-runs/examples/smlp_tiny.sh DATA checkpoints/tiny
  SMLP_ROOT=$PWD/my-runs smlp compare run my-runs/examples/compare/paper_small.yaml      (with where: slurm)

A file that is in DIR already, with other contents, is kept and named. Settings of your cluster belong in
DIR/scripts/slurm/site.sh and the .sbatch files."""
FOLDERS = ("examples", "scripts/slurm")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the argument."""
    parser.add_argument("dir", metavar="DIR", help="folder to write to; it is made if it does not exist")


def run(args: argparse.Namespace) -> int:
    """Copy the files; return 0."""
    from smlp.files import copy_whole, project_folder

    source, target = project_folder(), Path(args.dir)
    wanted = [path for folder in FOLDERS for path in sorted((source / folder).rglob("*")) if path.is_file()]
    wanted = [path for path in wanted if "__pycache__" not in path.parts]
    kept, written = [], 0
    for path in wanted:
        copy = target / path.relative_to(source)
        if os.path.lexists(copy):
            kept += [copy] if not copy.is_file() or not filecmp.cmp(copy, path, shallow=False) else []
            continue
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {copy.parent}: {error.strerror}") from None
        copy_whole(path, copy)
        copy.chmod(path.stat().st_mode & 0o755)
        written += 1
    for path in kept:
        print(f"kept {path}: its contents are not those of this version")
    print(f"{written} of {len(wanted)} files written to {target}")
    return 0
