"""End a rank that waits for a lost one with one sentence, wherever in fairseq it waits.

Exchanges of experts say themselves in which layer they failed (:mod:`smlp.parallel.group`). fairseq and
DistributedDataParallel have collectives in many more places; which one failed is read from the traceback.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from smlp.errors import ParallelError

#: how long ranks wait for each other while they connect; one that ended without an error leaves no other sign
MEETING = timedelta(minutes=5)
# besides its own classes, torch raises RuntimeErrors of its libraries
_OF_LIBRARIES = re.compile("gloo|nccl|tcpstore|c10d|socket", re.IGNORECASE)
# what a rank was doing, by function name in its traceback; {} is the number of the update
_PLACES = {
    "distributed_init": "meeting the other ranks",
    "Trainer.load_checkpoint": "loading a checkpoint",
    "Trainer.train_step": "update {}",
    "Tensor.backward": "backward pass",
    "Trainer._aggregate_logging_outputs": "sum of the statistics",
    "FairseqOptimizer.all_reduce_grads": "sum of the gradients",
    "Trainer.clip_grad_norm": "norm of the gradients",
    "Trainer.valid_step": "validation",
    "save_checkpoint": "saving a checkpoint",
}
# if none of these functions is in the traceback
_OTHER_PLACES = {"main": "start of training", "distributed_main": "end of the run"}


def lost_rank(error: RuntimeError, distributed: Any) -> ParallelError | None:
    """Return the message for an error of a collective, or of ranks that do not meet; None for another error.

    Args:
        error: as it was caught, with its traceback.
        distributed: fairseq's settings.
    """
    rank, world_size = distributed.distributed_rank, distributed.distributed_world_size
    if world_size == 1 or not (isinstance(error, dist.DistError) or _OF_LIBRARIES.search(str(error))):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_code.co_qualname for frame in frames]
    found: dict[str, None] = {}  # each place once, outermost first
    for name, frame in zip(names, frames, strict=True):
        place = _PLACES.get(name)
        if place is not None:
            number = frame.f_locals["self"].get_num_updates() + 1 if "{}" in place else None
            found[place.format(number)] = None
    others = [place for name, place in _OTHER_PLACES.items() if name in names]
    where = ", ".join(found) or next(iter(others), "start")
    return ParallelError.lost(f"rank {rank} of {world_size}: {where}", error)


def collective_timeout(heartbeat_timeout: int | None) -> timedelta | None:
    """Return how long a collective may wait for other ranks with ``--heartbeat-timeout``; None for torch's own limit.

    It is shorter than that option, after which fairseq interrupts the process, so that a message can say where ranks
    waited for each other.
    """
    return timedelta(seconds=0.75 * heartbeat_timeout) if heartbeat_timeout and heartbeat_timeout > 0 else None


def limit_waiting(timeout: timedelta | None) -> None:
    """Limit how long this process waits for other ranks, from the first meeting on.

    fairseq itself watches only from the first forward pass on.

    Args:
        timeout: of all collectives. None: ranks wait ``MEETING`` for each other while they connect their process
            groups, and later as long as torch lets them.
    """
    for name in ("init_process_group", "new_group"):
        make = getattr(dist, name)
        setattr(dist, name, functools.partial(make, timeout=timeout) if timeout is not None else _met_soon(make))


def _met_soon(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that connects a process group, with ``MEETING`` as its limit for this alone."""

    @functools.wraps(make)
    def make_soon(*args: Any, **kw: Any) -> Any:
        if kw.get("timeout") is not None:
            return make(*args, **kw)
        group = make(*args, **{**kw, "timeout": MEETING})
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            usual = dist.distributed_c10d._get_default_timeout(dist.get_backend(group))
            dist.distributed_c10d._set_pg_timeout(usual, group)
        return group

    return make_soon
