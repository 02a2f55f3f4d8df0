"""``smlp doctor --parallel``: whether the ranks of this machine or cluster work together."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from smlp.cli.check_report import OK, PROBLEM, Check, report
from smlp.errors import UserError

#: for one collective; what takes longer is taken for a rank that is gone
TIMEOUT = timedelta(seconds=60)
_REMEDY = "look at the messages of the other ranks; docs/parallel.md says what each check means"


def run(args: argparse.Namespace) -> int:
    """Checks the ranks that torchrun or srun started, or starts some on this machine and checks them."""
    from smlp.launch.ranks import has_terminal, place_of

    place = place_of(os.environ, is_interactive=has_terminal())
    if place is None:
        return _start_ranks(args)
    if args.nproc is not None and place.launcher == "srun":
        raise UserError(
            f"--nproc {args.nproc} starts ranks of its own, but srun has started {place.world_size} already"
        )
    return _check(place, args)


def _start_ranks(args: argparse.Namespace) -> int:
    import torch

    from smlp.launch.local import run_ranks
    from smlp.launch.program import this_program

    num_ranks = args.nproc if args.nproc is not None else max(2, torch.cuda.device_count())
    if num_ranks < 2:
        raise UserError(f"--nproc {num_ranks}: there must be at least 2 ranks to talk to each other")
    if torch.cuda.is_available() and num_ranks > torch.cuda.device_count():
        raise UserError(f"--nproc {num_ranks} is more than the {torch.cuda.device_count()} GPUs of this machine")
    command = [*this_program(), "doctor", "--parallel", "--dir", args.dir]
    if args.json:
        command += ["--json", args.json]
    return run_ranks(command, num_ranks)


def _check(place: Any, args: argparse.Namespace) -> int:
    import torch

    from smlp.launch.ranks import device_index
    from smlp.launch.team import leave, meet

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", device_index(place, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    meet(place, "nccl" if device.type == "cuda" else "gloo", TIMEOUT)
    checks = _all_checks(device, Path(args.dir).resolve())
    if place.rank > 0:
        status = 1 if any([check.status == PROBLEM for check in checks]) else 0  # a list: every check wants all ranks
    else:
        status = report(checks, args.json)
    leave()
    return status


def _all_checks(device: Any, folder: Path) -> Iterator[Check]:
    import torch

    from smlp.config.presets import PRESETS
    from smlp.evaluation.self_check import ARCHS, check_checkpoint, check_collectives, check_layout, check_uneven_splits

    yield _agreed("ranks", lambda: _describe_ranks(device))
    yield _agreed("collectives", lambda: check_collectives(device))
    halves = [torch.bfloat16, torch.float16]
    for dtype in [torch.float32, *halves]:
        name = f"uneven splits, {str(dtype).removeprefix('torch.')}"
        yield _agreed(name, lambda dtype=dtype: check_uneven_splits(device, dtype))
    for arch in (*ARCHS, *PRESETS.added()):
        yield _agreed(f"experts of {arch}", lambda arch=arch: check_layout(arch, device, TIMEOUT))
    yield _agreed("checkpoint", lambda: check_checkpoint(folder, device, TIMEOUT))


def _agreed(name: str, check: Callable[[], str]) -> Check:
    """The result of a check on this rank, a problem if any rank has one.

    Raises:
        ParallelError: a rank is gone: there is nobody left to agree with.
    """
    import torch.distributed as dist

    detail, problem = "", None
    try:
        detail = check()
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        problem = f"{kind}{error}"
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [(rank, each) for rank, each in enumerate(problems) if each is not None]
    if found:
        where = "all ranks" if len(found) == len(problems) else f"ranks {[rank for rank, _ in found]}"
        return Check(name, PROBLEM, f"{where}: {found[0][1]}", _REMEDY)
    return Check(name, OK, detail)


def _describe_ranks(device: Any) -> str:
    """Who is here; the same versions everywhere.

    Raises:
        UserError: versions differ.
    """
    import torch
    import torch.distributed as dist

    from smlp import __version__

    own = (socket.gethostname(), f"torch {torch.__version__}, smlp {__version__}", str(device.type))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for what in (1, 2):
        kinds = {each[what]: rank for rank, each in reversed(list(enumerate(everyone)))}
        if len(kinds) > 1:
            raise UserError("ranks differ: " + "; ".join(f"rank {rank} has {kind}" for kind, rank in kinds.items()))
    hosts = list(dict.fromkeys(each[0] for each in everyone))
    return f"{len(everyone)} on {', '.join(hosts)}; {dist.get_backend()}, {own[1]}"
