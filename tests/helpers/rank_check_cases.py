"""What ranks do in the tests of ``smlp doctor --parallel``: functions that run on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from smlp.cli.doctor import _agreed
from smlp.config.presets import PRESETS
from smlp.errors import ParallelError, UserError
from smlp.evaluation import self_check


def sabotaged_layout(place: str) -> str:
    """What the check of an update says when a part of it is done wrongly on rank 1."""
    own = getattr(self_check, place)
    if torch.distributed.get_rank() == 1:
        spoil = {
            "reduce_expert_gradients": lambda parameters, group: (
                own(parameters, group) or parameters[0].grad.mul_(1.01)
            ),
            "global_grad_norm": lambda *args: own(*args) * (1 + 1e-6),
        }
        setattr(self_check, place, spoil[place])
    try:
        return self_check.check_layout("smlp_tiny", torch.device("cpu"), timedelta(seconds=20))
    except ParallelError as error:
        return str(error)


def checkpoint_in_own_folder(folder: str) -> str:
    """What the check of a checkpoint says when each rank has a disk of its own."""
    own = Path(folder) / str(torch.distributed.get_rank())
    own.mkdir(exist_ok=True)
    try:
        return self_check.check_checkpoint(own, torch.device("cpu"), timedelta(seconds=20))
    except UserError as error:
        return str(error)


def failing_on_one_rank(folder: str, bad: int) -> list[list[str]]:
    """What the report says of checks that fail on one rank only, which must not leave the others waiting."""
    device, seconds, found = torch.device("cpu"), timedelta(seconds=20), []

    def check(place: str, run: Callable[[], str]) -> None:
        own = getattr(self_check, place)
        if torch.distributed.get_rank() == bad:
            setattr(self_check, place, fail)
        try:
            agreed = _agreed("check", run)
        finally:
            setattr(self_check, place, own)
        found.append([agreed.status, agreed.detail])

    def fail(*args: object, **options: object) -> None:
        raise UserError("cannot do this here")

    for place in ("write_part", "attach"):
        check(place, lambda: self_check.check_checkpoint(Path(folder), device, seconds))
    check("_require_equal", lambda: self_check.check_collectives(device))
    check("_require_equal", lambda: self_check.check_uneven_splits(device, torch.float32))
    return found


def same_with_plugins(files: str) -> None:
    """An update of the architectures that plugins register is the same as in one process."""
    os.environ["SMLP_PLUGINS"] = files
    found = PRESETS.added()
    assert len(found) == 3
    for arch in found:
        self_check.check_layout(arch, torch.device("cpu"), timedelta(seconds=20))
