"""Ask the launcher which rank this process is, and which device it gets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from smlp.errors import UserError
from smlp.launch.slurm import Tasks, port_of, tasks_of_step

_DIGITS = 9  # of a number of ranks or a port
_MOST_PORT = 65535
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


@dataclass(frozen=True)
class Place:
    """This process among the ranks that a launcher started."""

    #: name of the launcher in messages
    launcher: str
    rank: int
    world_size: int
    #: number on this machine, from 0; None if the launcher does not tell
    local_rank: int | None
    #: number of ranks on this machine; None if the launcher does not tell
    local_size: int | None
    #: where the ranks meet, as an init_method of torch.distributed
    init_method: str
    #: number of the machine, from 0
    node: int = 0
    #: number of machines, if each has a single rank
    nodes_of_one_rank: int | None = None
    #: whether each rank sees only its own devices instead of all of the machine's
    has_own_devices: bool = False


def place_of(environ: Mapping[str, str], port: int = 0, is_interactive: bool = False) -> Place | None:
    """Return this process's place among several ranks; None if it is alone.

    The variables of torchrun (which ``smlp train --nproc`` sets as well) come before those of srun, inside of which
    torchrun may run. With srun alone, MASTER_ADDR replaces the first host of the step, MASTER_PORT the derived port.

    Args:
        environ: environment variables.
        port: where the ranks of srun meet; 0 or less for MASTER_PORT, or one derived from job and step.
        is_interactive: whether the process belongs to a terminal.

    Raises:
        UserError: variables are missing, not numbers, or contradict each other.
    """
    if all(name in environ for name in _TORCHRUN):
        return _from_torchrun(environ)
    tasks = tasks_of_step(environ, is_interactive)
    if tasks is None:
        _check_alone(environ)
        return None
    return _from_srun(environ, tasks, port)


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raise ``UserError`` if only some of torchrun's variables are set, for several ranks: each would train alone."""
    given = [name for name in _TORCHRUN if name in environ]
    if "WORLD_SIZE" in given and _number(environ, "WORLD_SIZE") > 1:
        lacking = ", ".join(name for name in _TORCHRUN if name not in environ)
        raise UserError(
            f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {lacking} is not set: start the ranks with torchrun or smlp "
            "train --nproc, or unset WORLD_SIZE to train alone"
        )


def _from_torchrun(environ: Mapping[str, str]) -> Place | None:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if world_size < 1:
        raise UserError(f"WORLD_SIZE is {world_size}: at least one rank is needed")
    if world_size == 1 and rank == 0:
        return None
    if rank >= world_size:
        raise UserError(f"RANK is {rank} and WORLD_SIZE {world_size}: ranks count from 0")
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else None
    local_size = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    if local_size is not None and local_size <= (local_rank or 0):
        named = environ.get("LOCAL_RANK", "not set")
        raise UserError(f"LOCAL_RANK is {named} and LOCAL_WORLD_SIZE {local_size}: ranks count from 0")
    _host(environ, "")
    _port(environ)
    return Place(
        launcher="the launcher (WORLD_SIZE)",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        init_method="env://",
    )


def _from_srun(environ: Mapping[str, str], tasks: Tasks, port: int) -> Place:
    host = _host(environ, tasks.hosts[0])
    if port <= 0:
        port = _port(environ) if "MASTER_PORT" in environ else port_of(tasks.job_id, tasks.step_id)
    if ":" in host and not host.startswith("["):  # an IPv6 address
        host = f"[{host}]"
    one_each = set(tasks.tasks_per_node) == {1}
    return Place(
        launcher="srun",
        rank=tasks.rank,
        world_size=tasks.world_size,
        local_rank=tasks.local_rank,
        local_size=tasks.tasks_per_node[tasks.node],
        init_method=f"tcp://{host}:{port}",
        node=tasks.node,
        nodes_of_one_rank=len(tasks.hosts) if one_each else None,
        has_own_devices="SLURM_GPUS_PER_TASK" in environ,
    )


def _host(environ: Mapping[str, str], default: str) -> str:
    host = environ.get("MASTER_ADDR", default)
    if not host.strip():
        raise UserError("MASTER_ADDR is empty: set it to the host of rank 0, where the ranks meet")
    return host


def _port(environ: Mapping[str, str]) -> int:
    port = _number({"MASTER_PORT": environ["MASTER_PORT"].strip()}, "MASTER_PORT")
    if not 1 <= port <= _MOST_PORT:
        raise UserError(f"MASTER_PORT is {port}: ports go from 1 to {_MOST_PORT:,}")
    return port


def check_local_rank(environ: Mapping[str, str]) -> None:
    """Refuse a LOCAL_RANK that is no number, which fairseq reads when it is imported."""
    given = environ.get("LOCAL_RANK", "0")
    try:
        int(given)
    except ValueError:
        raise UserError(
            f"LOCAL_RANK is {given!r:.60}, not a number: unset it, or start the ranks with torchrun"
        ) from None


def has_terminal() -> bool:
    """Return whether this process belongs to a terminal, even if its input and output are redirected."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def device_index(place: Place, visible: int) -> int:
    """Return the number of this rank's GPU among the ``visible`` ones, of which there is at least one.

    Raises:
        UserError: ranks would have to share a GPU, or nothing tells which of several is this rank's.
    """
    if place.local_rank is None:
        if visible == 1:
            return 0
        raise UserError(
            f"LOCAL_RANK is not set, which tells rank {place.rank} the number of its GPU among the {visible} visible "
            "ones: set it to the number of the rank on its machine, from 0"
        )
    if max(place.local_size or 0, place.local_rank + 1) <= visible:
        return place.local_rank
    if place.launcher == "srun" and (visible == 1 or place.has_own_devices):
        return place.local_rank % visible  # Slurm shows each task only its own GPUs, numbered from 0
    ranks = place.local_size or f"at least {place.local_rank + 1}"
    raise UserError(
        f"{ranks} ranks on a machine with {visible} visible GPU{'s' * (visible > 1)}: start one rank for each GPU, or "
        "use CPUs"
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isascii() or not environ[name].isdecimal() or len(environ[name]) > _DIGITS:
        raise UserError(f"{name} is {environ[name]!r}, not a number")
    return int(environ[name])
