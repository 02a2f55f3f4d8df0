"""``smlp train``: fairseq-train with this package loaded."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smlp.errors import UserError
from smlp.fairseq_compat.arguments import (
    DEFAULT_ARCH,
    TOKENS_PER_BATCH,
    default_arguments,
    has_option,
    option_value,
    positive_number,
    without_options,
)
from smlp.fairseq_compat.command_line import package_dir, run_training, training_configuration
from smlp.launch.local import run_ranks, this_program
from smlp.launch.ranks import has_terminal, place_of
from smlp.launch.stop_signals import EXIT_STOPPED
from smlp.text.tokenizer_files import DICTIONARY, TOKENIZER_FILES, Vocabulary

if TYPE_CHECKING:
    from smlp.launch.plan import PlannedRank

PASS_THROUGH = True

# A checkpoint is useless without these, so they are copied into the save-dir, which can then be moved.
COMPANIONS = (DICTIONARY, *TOKENIZER_FILES)

_PROFILE, _PROFILE_UPDATES = "--profile", "--profile-updates"
_NUMBERS = ("--nproc", "--nodes", "--gpus-per-node")
_DRY_RUN, _BY_HAND, _WORLD_SIZE = "--dry-run", "--distributed-init-method", "--distributed-world-size"
USAGE = "smlp train [--nproc N] [--dry-run] [--profile N] DATA [any option of fairseq-train]"
DESCRIPTION = (
    textwrap.fill(
        "fairseq-train with this package loaded. All arguments are passed on unchanged. The defaults are "
        f"--task language_modeling, --arch {DEFAULT_ARCH}, the --tokens-per-sample that the architecture was "
        f"designed for, batches of {TOKENS_PER_BATCH} tokens and Adam at a learning rate of 5e-4. The save-dir "
        f"also gets {DICTIONARY} and the tokenizer's files from DATA (not of sentence_prediction)."
    )
    + "\n\n"
    + textwrap.fill(
        "SIGUSR1, SIGTERM or SIGHUP stops a run after its current update: it saves and exits with status "
        f"{EXIT_STOPPED}, and its last line says how to resume it, usually with the same command."
    )
)
EPILOG = """options of its own:
  --nproc N            N ranks on this machine, one on each GPU, or on CPUs; the lines
                       of ranks 1 to N-1 begin with [rank 1] ...; if one fails, all end
  --dry-run            train nothing; print every rank's host, device and experts, and
                       the full command
  --nodes M --gpus-per-node G
                       with --dry-run: for M machines with G GPUs each
  --profile N [--profile-dir DIR]
                       after a few warm-up updates, profile N updates: a Chrome trace of
                       each rank in DIR (default: the save-dir), and a table of time,
                       FLOPs and speed of each component (fairseq-train:
                       --profile-updates N; its own --profile is another option)

examples:
  smlp train data-bin --arch smlp_tiny --max-update 2000 --save-dir checkpoints/first
  smlp train --nproc 2 data-bin --arch smlp_tiny --max-update 2000 --save-dir checkpoints/second
  smlp train --profile 5 data-bin --arch smlp_tiny --max-update 20 --save-dir checkpoints/third
  smlp train --dry-run --nodes 4 --gpus-per-node 8 data-bin --arch smlp

all options: fairseq-train --help shows fairseq's common ones; those of the models, tasks and criteria of
this package are in docs/commands.md"""


@dataclass(frozen=True)
class LaunchOptions:
    """The options that say where to run; ``rest`` holds fairseq's options."""

    nproc: int | None
    nodes: int | None
    gpus_per_node: int | None
    dry_run: bool
    rest: list[str]


def run(args: argparse.Namespace) -> int:
    options = read_launch_options(with_profile_updates(args.arguments))
    if options.dry_run:
        return dry_run(options, default_arguments(options.rest))
    if options.nproc is not None:
        check_nproc(options)
    if options.nproc is not None and options.nproc > 1:
        return train_on_ranks(options)
    return train([*options.rest, *_one_rank(options)])


def _one_rank(options: LaunchOptions) -> list[str]:
    """Return the option without which fairseq starts a rank on each GPU, if there shall be one rank."""
    return [_WORLD_SIZE, "1"] if options.nproc == 1 and not has_option(options.rest, _WORLD_SIZE) else []


def train(arguments: list[str]) -> int:
    """Run fairseq-train in this process, which may be one of several ranks, with defaults for missing options."""
    added = default_arguments(arguments)

    @contextlib.contextmanager
    def prepared(cfg: Any) -> Iterator[None]:
        if added and cfg.distributed_training.distributed_rank == 0:
            with contextlib.suppress(OSError):  # a log that cannot be written ends no training
                print(f"smlp train: using {' '.join(added)}", file=sys.stderr, flush=True)
        copied = prepare(cfg)
        try:
            yield
        except UserError:
            for path in copied:
                if not any(path.parent.glob("*.pt")):  # nothing but a checkpoint needs it
                    path.unlink(missing_ok=True)
            raise

    run_training([*added, *arguments], prepared)
    return 0


def with_profile_updates(arguments: list[str]) -> list[str]:
    """Turn ``--profile N`` into ``--profile-updates N``; fairseq's own ``--profile`` has no number.

    Raises:
        UserError: N is not a number of at least 1, or both are given.
    """
    num_updates = positive_number(arguments, _PROFILE)
    if num_updates is None:
        return arguments
    if has_option(arguments, _PROFILE_UPDATES):
        raise UserError(f"{_PROFILE} and {_PROFILE_UPDATES} are the same option: give one of the two")
    return [*without_options(arguments, _PROFILE), _PROFILE_UPDATES, str(num_updates)]


def prepare(cfg: Any) -> list[Path]:
    """Check the data and make the save-dir self-contained, before anything is built.

    Returns:
        The files that the save-dir did not have before.

    Raises:
        UserError: data are missing, empty or damaged, or the save-dir belongs to another dictionary.
    """
    from fairseq.utils import split_paths

    from smlp.fairseq_compat.data import check_dictionary, check_split
    from smlp.fairseq_compat.loading import check_dictionary_of

    task = cfg.task
    name, saves = getattr(task, "_name", None), cfg.distributed_training.distributed_rank == 0
    if name == "squad" and (Path(task.data) / DICTIONARY).is_file():
        directory = task.data
    elif name in ("language_modeling", "masked_lm"):
        directory = split_paths(task.data)[0]
        check_dictionary(directory)
        if getattr(cfg.dataset, "dataset_impl", None) not in ("raw", "fasta"):
            check_split(directory, cfg.dataset.train_subset)
    else:
        return []
    if cfg.checkpoint.no_save or not saves:
        return []
    last = Path(cfg.checkpoint.save_dir) / "checkpoint_last.pt"
    if last.is_file():  # check before a dictionary is copied into its folder
        check_dictionary_of(str(last), directory, cfg.model)
    return copy_companions(Path(directory), Path(cfg.checkpoint.save_dir))


def copy_companions(data: Path, save_dir: Path) -> list[Path]:
    """Copy the dictionary and, if there is one, the tokenizer from the data directory into the save-dir.

    Returns:
        The files that were not there before.

    Raises:
        UserError: the save-dir holds checkpoints trained with another dictionary, has other files of these names, or
            cannot be written.
    """
    from smlp.files import copy_whole

    ours, theirs = save_dir / DICTIONARY, data / DICTIONARY
    if ours.is_file() and any(save_dir.glob("checkpoint*.pt")) and _meaning(ours) != _meaning(theirs):
        sizes = [len(path.read_bytes().splitlines()) for path in (ours, theirs)]
        raise UserError(
            f"--save-dir {save_dir} holds checkpoints trained with another dictionary ({sizes[0]} symbols) "
            f"than {theirs} ({sizes[1]} symbols): choose another --save-dir"
        )
    try:
        save_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make --save-dir {save_dir}: {error.strerror}") from error
    given = [name for name in COMPANIONS if (data / name).is_file()]
    for name in given:
        if (save_dir / name).is_file() and _meaning(save_dir / name) != _meaning(data / name):
            raise UserError(f"--save-dir {save_dir} has another {name} than {data}: choose another --save-dir")
    copied = [save_dir / name for name in given if not (save_dir / name).exists()]
    for path in copied:
        copy_whole(data / path.name, path)
    return copied


def _meaning(path: Path) -> bytes | list[str]:
    """Return the symbols of a dictionary, whose counts mean nothing to a model, or the content of another file."""
    with contextlib.suppress(UserError):
        if path.name == DICTIONARY:
            return Vocabulary.load(path).symbols
    return path.read_bytes()


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
        raise UserError("--nodes and --gpus-per-node must be given together")
    if options.nodes is not None and not dry_run:
        raise UserError("--nodes and --gpus-per-node only plan a run, with --dry-run; srun or torchrun starts it")
    if options.nodes is not None and options.nproc is not None:
        raise UserError("--nproc is for this machine, --nodes for a plan of others: give one of the two")
    return options


def check_nproc(options: LaunchOptions) -> None:
    """Check that several ranks can be started here.

    Raises:
        UserError: another launcher is at work, the options contradict each other, or there are too few GPUs.
    """
    nproc, rest = options.nproc or 1, options.rest
    place = place_of(os.environ, is_interactive=has_terminal())
    if place is not None and not nproc == place.world_size == 1:
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
    """Run ``smlp train`` once for each rank; return the exit status."""
    heartbeat = option_value(options.rest, "--heartbeat-timeout") or ""
    patience = int(heartbeat) if heartbeat.isdecimal() and len(heartbeat) < 10 and int(heartbeat) > 0 else None
    return run_ranks([*this_program(), "train", *options.rest], options.nproc, patience=patience)


def dry_run(options: LaunchOptions, defaults: list[str]) -> int:
    """Print the host, device and experts of every rank, and its command; of several processes, only rank 0 prints.

    Args:
        options: of the command line.
        defaults: options that are added to it.

    Raises:
        UserError: an option is wrong, or ranks and experts do not fit.
    """
    from smlp.config.presets import num_experts_of
    from smlp.fairseq_compat.settings import check_before_start, check_half_precision
    from smlp.launch.plan import rank_table

    arguments = [*defaults, *options.rest]
    ranks, rank = _ranks(options)
    asked = option_value(arguments, _WORLD_SIZE)
    if asked is not None and asked != str(len(ranks)):
        raise UserError(f"{_WORLD_SIZE} {asked}, but there are {len(ranks)} ranks: leave it out")
    cfg = training_configuration(without_options(arguments, _WORLD_SIZE))
    has_cuda = any(planned.device != "cpu" for planned in ranks)
    check_half_precision(cfg, has_cuda)
    check_before_start(cfg, len(ranks), has_cuda, is_here=options.nodes is None)
    if rank == 0:
        user_dir = [] if has_option(arguments, "--user-dir") else ["--user-dir", package_dir()]
        group_size = getattr(cfg.model, "expert_parallel_size", None)
        command = shlex.join(["fairseq-train", *user_dir, *arguments, *_one_rank(options)])
        print(rank_table(ranks, num_experts_of(cfg.model), group_size, command))
    return 0


def _ranks(options: LaunchOptions) -> tuple[list[PlannedRank], int]:
    from smlp.launch.plan import ranks_from_environment, ranks_here, ranks_of_nodes

    if options.nodes is not None and options.gpus_per_node is not None:
        return ranks_of_nodes(options.nodes, options.gpus_per_node, has_option(options.rest, "--cpu")), 0
    num_gpus = count_gpus(options.rest)
    if options.nproc is not None:
        check_nproc(options)
        return ranks_here(options.nproc, num_gpus), 0
    found = ranks_from_environment(os.environ, num_gpus, has_terminal())
    return found or (ranks_here(max(1, num_gpus), num_gpus), 0)
