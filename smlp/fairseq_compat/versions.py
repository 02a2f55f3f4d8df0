"""Restore names and defaults that newer versions of numpy and torch have changed."""

from __future__ import annotations

import types

import numpy
import torch

from smlp.errors import ParallelError


def apply() -> None:
    # numpy 2 removed `np.compat`. TokenBlockDataset uses `np.compat.long` for --sample-break-mode eos, as do all data
    # sets that fairseq-interactive and fairseq-generate build.
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=numpy.int64)  # noqa: NPY201  this is the removed name itself

    from fairseq.distributed import utils as distributed_utils

    distributed_utils._broadcast_object_slow = _broadcast_object


def _broadcast_object(
    obj: object, src_rank: int, group: torch.distributed.ProcessGroup, dist_device: torch.device
) -> object:
    """Send a Python object from one rank of a run to the others.

    fairseq's own version reads it with torch.load, which since torch 2.6 rejects the configuration inside a checkpoint,
    so that every run of several processes failed to resume. The bytes come from a process of the same run, never from
    a file, so pickle is as safe here as it was before.
    """
    box = [obj]
    try:
        torch.distributed.broadcast_object_list(box, src=src_rank, group=group, device=dist_device)
    except RuntimeError as error:
        rank = torch.distributed.get_rank()
        raise ParallelError(
            f"rank {rank} received nothing from rank {src_rank}, which stopped first ({error})"
        ) from error
    return box[0]
