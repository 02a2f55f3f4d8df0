"""``smlp train --dry-run``: who would do what, without doing it."""

from __future__ import annotations

import contextlib
import os
import shlex
from typing import Any

from smlp.cli.fairseq_tool import package_dir, run_tool
from smlp.cli.local_ranks import LaunchOptions, check_nproc, count_gpus, without_options
from smlp.config.presets import num_experts_of
from smlp.errors import UserError
from smlp.fairseq_compat.arguments import has_option, option_value
from smlp.launch.plan import Seat, rank_table, seats_from_environment, seats_here, seats_of_nodes
from smlp.launch.ranks import has_terminal

_WORLD_SIZE = "--distributed-world-size"


class _SeenEnough(Exception):
    """The options are read; nothing is to be trained."""


def dry_run(options: LaunchOptions, defaults: list[str]) -> int:
    """Prints every rank's host, device and experts, and its command; on rank 0 only, if this is one of several.

    Args:
        options: of the command line.
        defaults: options that are added to it.

    Raises:
        UserError: an option is wrong, or ranks and experts do not fit.
    """
    arguments = [*defaults, *options.rest]
    seats, rank = _seats(options)
    asked = option_value(arguments, _WORLD_SIZE)
    if asked is not None and asked != str(len(seats)):
        raise UserError(f"{_WORLD_SIZE} {asked}, but there are {len(seats)} ranks: leave it out")
    cfg = configuration_of(without_options(arguments, _WORLD_SIZE))
    from smlp.fairseq_compat.settings import check_before_start, check_half_precision

    has_cuda = any(seat.device != "cpu" for seat in seats)
    check_half_precision(cfg, has_cuda)
    check_before_start(cfg, len(seats), has_cuda)
    if rank == 0:
        user_dir = [] if has_option(arguments, "--user-dir") else ["--user-dir", package_dir()]
        group_size = getattr(cfg.model, "expert_parallel_size", None)
        command = shlex.join(["fairseq-train", *user_dir, *arguments])
        print(rank_table(seats, num_experts_of(cfg.model), group_size, command))
    return 0


def configuration_of(arguments: list[str]) -> Any:
    """fairseq's complete configuration for a command line of ``fairseq-train``; nothing is started.

    Raises:
        UserError: an option is wrong.
    """
    seen: list[Any] = []

    def stop(cfg: Any) -> None:
        seen.append(cfg)
        raise _SeenEnough

    with contextlib.suppress(_SeenEnough):
        run_tool("train", arguments, look=stop)
    return seen[0]


def _seats(options: LaunchOptions) -> tuple[list[Seat], int]:
    if options.nodes is not None and options.gpus_per_node is not None:
        return seats_of_nodes(options.nodes, options.gpus_per_node, has_option(options.rest, "--cpu")), 0
    num_gpus = count_gpus(options.rest)
    if options.nproc is not None and options.nproc > 1:
        check_nproc(options)
        return seats_here(options.nproc, num_gpus), 0
    found = seats_from_environment(os.environ, num_gpus, has_terminal())
    return found or (seats_here(max(1, num_gpus), num_gpus), 0)
