"""Options of ``smlp train`` that say where to run: several ranks on this machine, or a plan for others."""

from __future__ import annotations

import os
from dataclasses import dataclass

from smlp.errors import UserError
from smlp.fairseq_compat.arguments import has_option, option_value
from smlp.launch.local import run_ranks
from smlp.launch.program import this_program
from smlp.launch.ranks import has_terminal, place_of

_NUMBERS = ("--nproc", "--nodes", "--gpus-per-node")
_DRY_RUN = "--dry-run"
_BY_HAND = "--distributed-init-method"
_WORLD_SIZE = "--distributed-world-size"


@dataclass(frozen=True)
class LaunchOptions:
    """The options about where to run; ``rest`` are fairseq's."""

    nproc: int | None
    nodes: int | None
    gpus_per_node: int | None
    dry_run: bool
    rest: list[str]


def read_launch_options(arguments: list[str]) -> LaunchOptions:
    """Take the launch options out of a command line.

    Raises:
        UserError: a value is not a number, or an option lacks its partner.
    """
    numbers = {name: positive_number(arguments, name) for name in _NUMBERS}
    dry_run = has_option(arguments, _DRY_RUN)
    rest = [word for word in without_options(arguments, *_NUMBERS) if word != _DRY_RUN]
    options = LaunchOptions(numbers["--nproc"], numbers["--nodes"], numbers["--gpus-per-node"], dry_run, rest)
    if (options.nodes is None) != (options.gpus_per_node is None):
        raise UserError("--nodes and --gpus-per-node belong together")
    if options.nodes is not None and not dry_run:
        raise UserError("--nodes and --gpus-per-node plan a run with --dry-run; srun or torchrun starts it")
    if options.nodes is not None and options.nproc is not None:
        raise UserError("--nproc is for this machine, --nodes for a plan of others: give one of the two")
    return options


def without_options(arguments: list[str], *names: str) -> list[str]:
    """Return the arguments without these options and their values."""
    kept, words = [], iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in names:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def check_nproc(options: LaunchOptions) -> None:
    """Check that several ranks can be started here.

    Raises:
        UserError: another launcher is at work, the options contradict each other, or there are too few GPUs.
    """
    nproc, rest = options.nproc or 1, options.rest
    place = place_of(os.environ, is_interactive=has_terminal())
    if place is not None:
        raise UserError(
            f"--nproc {nproc}, but {place.launcher} started {place.world_size} ranks already: give one of the two"
        )
    if has_option(rest, _BY_HAND):
        raise UserError(f"--nproc {nproc} starts the ranks itself: leave {_BY_HAND} out")
    world_size = option_value(rest, _WORLD_SIZE)
    if world_size is not None and world_size != str(nproc):
        raise UserError(f"--nproc {nproc} and {_WORLD_SIZE} {world_size} contradict each other: leave the latter out")
    num_gpus = count_gpus(rest)
    if 0 < num_gpus < nproc:
        raise UserError(
            f"--nproc {nproc} on a machine with {num_gpus} visible GPU{'s' * (num_gpus > 1)}: give --nproc {num_gpus}, "
            "or --cpu to train on its CPUs"
        )


def count_gpus(arguments: list[str]) -> int:
    """Return how many GPUs of this machine a run with these options uses."""
    if has_option(arguments, "--cpu"):
        return 0
    import torch

    return torch.cuda.device_count()


def train_on_ranks(options: LaunchOptions) -> int:
    """Run ``smlp train`` once for each rank; return the exit status.

    Raises:
        UserError: see :func:`check_nproc`.
    """
    check_nproc(options)
    heartbeat = option_value(options.rest, "--heartbeat-timeout") or ""
    patience = int(heartbeat) if heartbeat.isdecimal() and int(heartbeat) > 0 else None
    return run_ranks([*this_program(), "train", *options.rest], options.nproc, patience=patience)


def positive_number(arguments: list[str], name: str) -> int | None:
    """Return the value of an option; None if it is not given.

    Raises:
        UserError: it is not a number of at least 1.
    """
    if not has_option(arguments, name):
        return None
    text = option_value(arguments, name) or ""
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} needs a number of at least 1, not {text!r}")
    return int(text)
