"""Agreeing on sizes before data move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smlp.errors import ParallelError
from smlp.parallel.group import Group
from smlp.parallel.spans import SKEW, stage_of

#: a name travels as so many 8-byte words; longer ones are cut
_NAME_WORDS = 8
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HEAD = _NAME_WORDS + 2


def agree_on_sizes(group: Group, name: str, x: Tensor, sizes_Pk: Tensor) -> list[list[int]]:
    """Tells every rank what it will get from this one, and checks that all are at the same place of the model.

    One collective of fixed size, and one wait for the device.

    Args:
        group: the ranks.
        name: of the layer.
        x: the data to be sent later: its width (last axis) and dtype must be the same on all ranks.
        sizes_Pk: whole numbers for each rank, (P, k), int64; k is the same in all layers of a model.

    Returns:
        The numbers that each rank has for this one, P lists of k.

    Raises:
        ParallelError: another rank is in another layer, or has data of another width or dtype. Then all ranks of the
            group raise it.
    """
    words = name.encode()[: 8 * _NAME_WORDS].ljust(8 * _NAME_WORDS, b"\0")
    head = [int.from_bytes(words[i : i + 8], "little", signed=True) for i in range(0, len(words), 8)]
    head += [x.size(-1), _DTYPES.index(x.dtype)]
    head_Pk = torch.tensor(head, device=sizes_Pk.device).expand(group.size, -1)
    where = f"{name}, before sending {tuple(x.shape)} {x.dtype}"
    with stage_of(name, SKEW):
        received = group.exchange_counts(torch.cat([head_Pk, sizes_Pk], dim=1), where).tolist()
    for rank, row in enumerate(received):
        if row[:_HEAD] != head:
            members = getattr(group, "members", range(group.size))
            raise ParallelError(
                f"rank {members[group.rank]} has {_described(head)}, but rank {members[rank]} has "
                f"{_described(row[:_HEAD])}: they no longer compute the same thing (another batch, precision or model?)"
            )
    return [row[_HEAD:] for row in received]


def _described(head: Sequence[int]) -> str:
    name = b"".join(word.to_bytes(8, "little", signed=True) for word in head[:_NAME_WORDS]).rstrip(b"\0")
    width, dtype = head[_NAME_WORDS:]
    return f"data of shape (.., {width}) in {_DTYPES[dtype]} at {name.decode(errors='replace')}"
