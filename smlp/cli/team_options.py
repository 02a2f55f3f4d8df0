"""Options of commands that share their work among ranks: ``--nproc``, or torchrun or srun around the command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from smlp.errors import UserError
from smlp.launch.team import Team, team_at


def add_team_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--nproc``; the command also needs ``--device``."""
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="share the work among N processes of this machine, each with the model"
    )


def as_team(args: argparse.Namespace, work: Callable[[Team], int]) -> int:
    """Does the work here, or on the ranks that ``--nproc`` asks for, or as one of those that a launcher started.

    Args:
        args: of the command, with ``nproc``, ``device`` and ``words``, the command line itself.
        work: what each rank does; returns the exit status.

    Raises:
        UserError: ``--nproc`` is below 1 or contradicts the launcher.
    """
    from smlp.launch.ranks import has_terminal, place_of

    if args.nproc is not None and args.nproc < 1:
        raise UserError(f"--nproc must be at least 1, got {args.nproc}")
    place = place_of(os.environ, is_interactive=has_terminal())
    if place is None and args.nproc not in (None, 1):
        from smlp.launch.local import run_ranks
        from smlp.launch.program import this_program

        return run_ranks([*this_program(), *args.words], args.nproc)
    if place is not None and args.nproc not in (None, place.world_size):
        raise UserError(
            f"--nproc {args.nproc}, but {place.launcher} started {place.world_size} ranks already: leave it out"
        )
    with team_at(place, args.device) as team:
        return work(team)
