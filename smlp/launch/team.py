"""Ranks that share work, not weights: each has the whole model, does a part of the work and shares its results."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from smlp.errors import ParallelError, UserError
from smlp.launch.ranks import Place, device_index

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
#: how long a rank may continue after the others have finished
PATIENCE = timedelta(hours=12)


@dataclass(frozen=True)
class Team:
    """This rank among W; alone by default."""

    rank: int = 0
    #: W
    size: int = 1
    #: index of this rank's GPU among its visible ones; None if the user chooses
    gpu: int | None = None

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that reports."""
        return self.rank == 0

    def gather(self, part: _T) -> list[_T]:
        """Return the objects that the ranks pass, in the order of the ranks; any objects that can be pickled.

        Raises:
            ParallelError: a rank is gone.
        """
        if self.size == 1:
            return [part]
        import torch.distributed as dist

        parts: list = [None] * self.size
        try:
            dist.all_gather_object(parts, part)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ParallelError(
                f"rank {self.rank} lost contact with another rank ({reason}): see that rank's messages"
            ) from None
        return parts

    def device(self, wanted: str | None) -> torch.device:
        """Return this rank's device: the one that is asked for, else a GPU if there is one.

        Raises:
            UserError: there is no such device, or ranks would have to share a GPU.
        """
        import torch

        if wanted is None:
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(wanted)
            if device.type == "cuda" and device.index is None and self.gpu is not None:
                device = torch.device("cuda", self.gpu)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, ImportError) as error:  # some kinds of device are modules of their own
            raise UserError(f"--device {wanted} cannot be used here: {str(error).splitlines()[0]}") from None
        if device.type == "meta":
            raise UserError("--device meta computes nothing: name another device")
        return device


@contextmanager
def team_at(place: Place | None, wanted_device: str | None = None) -> Iterator[Team]:
    """Connect this process to its team; without a place among ranks, it is a team of its own.

    Args:
        place: of this process, from :func:`smlp.launch.ranks.place_of`.
        wanted_device: the user's choice; there may be more ranks than GPUs if they use CPUs.

    Raises:
        UserError: the ranks do not reach each other, or would have to share a GPU.
    """
    if place is None:
        yield Team()
        return
    import torch

    gpu = None
    if torch.cuda.is_available() and wanted_device in (None, "cuda"):
        gpu = device_index(place, torch.cuda.device_count())
    meet(place, "gloo", PATIENCE)  # only results in main memory are exchanged
    try:
        yield Team(place.rank, place.world_size, gpu)
    finally:
        leave()


def leave() -> None:
    """Disconnect the ranks when their common work is done; does nothing if they were never connected.

    Threads of the process group hold tensors for a moment after a collective has returned, and Python aborts if it ends
    in that moment.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def meet(place: Place, backend: str, timeout: timedelta) -> None:
    """Set torch.distributed up among the ranks that a launcher started.

    Raises:
        UserError: this rank does not reach the others.
    """
    import torch.distributed as dist

    try:
        dist.init_process_group(
            backend, init_method=place.init_method, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {place.rank} of {place.world_size} on {socket.gethostname()} cannot reach the others at "
            f"{place.init_method} ({reason})"
        ) from error
