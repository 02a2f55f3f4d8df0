"""Plan where every rank would run and what it would hold, and show it as a table, without starting anything."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence

from smlp.errors import UserError
from smlp.launch.ranks import place_of
from smlp.launch.slurm import Tasks, tasks_of_job, tasks_of_step
from smlp.parallel import ExpertLayout

_MOST_RANKS = 1 << 16


@dataclasses.dataclass(frozen=True)
class PlannedRank:
    """The place where a rank would run."""

    host: str
    device: str


def ranks_of_nodes(num_nodes: int, gpus_per_node: int, cpu: bool) -> list[PlannedRank]:
    """Plan one rank for each GPU of a cluster that this machine does not belong to; its nodes are called node0, ...

    Raises:
        UserError: there are more ranks than a table can show.
    """
    _check_number(num_nodes * gpus_per_node, f"--nodes {num_nodes} with --gpus-per-node {gpus_per_node}")
    return [
        PlannedRank(f"node{node}", "cpu" if cpu else f"cuda:{number}")
        for node in range(num_nodes)
        for number in range(gpus_per_node)
    ]


def _check_number(num_ranks: int, given: str) -> None:
    if num_ranks > _MOST_RANKS:
        raise UserError(f"{given} are {num_ranks:,} ranks: at most {_MOST_RANKS:,}")


def ranks_here(num_ranks: int, num_gpus: int) -> list[PlannedRank]:
    """Plan ranks on this machine.

    Args:
        num_ranks: W.
        num_gpus: that they may use; 0 for none.

    Raises:
        UserError: there are more ranks than a table can show.
    """
    _check_number(num_ranks, f"--nproc {num_ranks}")
    host = socket.gethostname()
    return [PlannedRank(host, f"cuda:{rank}" if num_gpus else "cpu") for rank in range(num_ranks)]


def ranks_from_environment(
    environ: Mapping[str, str], num_gpus: int, is_interactive: bool
) -> tuple[list[PlannedRank], int] | None:
    """Return the ranks that torchrun or srun started, or that srun would start in this batch script or allocation.

    Args:
        environ: environment variables.
        num_gpus: visible on this machine.
        is_interactive: whether the process belongs to a terminal.

    Returns:
        The ranks, and the number of this process among them; None without a launcher.

    Raises:
        UserError: as :func:`place_of`, or there are more ranks than a table can show.
    """
    place = place_of(environ, is_interactive=is_interactive)
    if place is not None and place.init_method == "env://":
        _check_number(place.world_size, f"WORLD_SIZE {place.world_size}")
        size = place.local_size or place.world_size
        here = place.rank // size
        return [
            PlannedRank(
                socket.gethostname() if rank // size == here else f"node{rank // size}",
                f"cuda:{rank % size}" if num_gpus else "cpu",
            )
            for rank in range(place.world_size)
        ], place.rank
    tasks = tasks_of_step(environ, is_interactive) or tasks_of_job(environ)
    if tasks is None or tasks.world_size == 1:
        return None
    return _ranks_of_tasks(tasks, num_gpus), tasks.rank


def _ranks_of_tasks(tasks: Tasks, num_gpus: int) -> list[PlannedRank]:
    if set(tasks.tasks_per_node) == {1} and num_gpus > 1:  # fairseq then starts a process per GPU
        return [PlannedRank(host, f"cuda:{number}") for host in tasks.hosts for number in range(num_gpus)]
    ranks, used = [], dict.fromkeys(tasks.hosts, 0)
    for host in tasks.host_of_ranks():
        number = used.get(host, 0)
        used[host] = number + 1
        ranks.append(PlannedRank(host, f"cuda:{number % num_gpus}" if num_gpus else "cpu"))
    return ranks


def rank_table(ranks: Sequence[PlannedRank], num_experts: int, group_size: int | None, command: str) -> str:
    """Return a table of every rank's host, device and experts, with the command that each of them runs.

    Args:
        ranks: by rank.
        num_experts: E, 0 for a model without experts.
        group_size: P, None for the largest that fits.
        command: as typed in a shell.

    Raises:
        UserError: P does not fit the ranks and the experts.
    """
    world_size = len(ranks)
    rows = [("rank", "host", "device", "experts")]
    for rank, planned in enumerate(ranks):
        experts = "-"
        if num_experts:
            ids = ExpertLayout(num_experts, world_size, rank, group_size).expert_ids
            experts = f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else str(ids[0])
        rows.append((str(rank), planned.host, planned.device, experts))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{rank:>{widths[0]}}  {host:<{widths[1]}}  {device:<{widths[2]}}  {experts}"
        for rank, host, device, experts in rows
    ]
    return "\n".join([*lines, _summary(world_size, num_experts, group_size), f"each rank runs: {command}"])


def _summary(world_size: int, num_experts: int, group_size: int | None) -> str:
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    if not num_experts:
        return f"{ranks}; no experts: every rank holds the whole model"
    layout = ExpertLayout(num_experts, world_size, 0, group_size)
    return (
        f"{ranks}; {num_experts} experts in each sparse layer, {layout.num_local} on a rank; expert-parallel size "
        f"{layout.group_size}, {layout.num_replicas} cop{'ies' if layout.num_replicas > 1 else 'y'} of each expert"
    )
