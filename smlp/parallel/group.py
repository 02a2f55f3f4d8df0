"""Groups of ranks that modules are given, so that none asks whether torch.distributed is up; the one all-to-all.

:class:`LocalGroup` is the stand-in for one process: a group of one, with which everything is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from smlp.errors import ParallelError
from smlp.parallel.spans import SKEW, backward_of, current_span, stage_of

#: a name is sent as this many 8-byte words; longer ones are cut
_NAME_WORDS = 8
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_HEAD = _NAME_WORDS + 2
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Group(Protocol):
    """Ranks that communicate; every call is a collective, which all of them make in the same order.

    ``name`` says where in the model a call is, for error messages.
    """

    #: ranks in the group
    size: int
    #: this process's position among them
    rank: int

    def all_to_all(self, x: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int], name: str) -> Tensor:
        """Send consecutive rows of x (R, ...) to the ranks in turn; return theirs (sum(receive_splits), ...).

        Differentiable; the splits (numbers of rows, zeros allowed) must have been agreed on before.
        """

    def exchange_counts(self, counts_Pk: Tensor, name: str) -> Tensor:
        """Send row p of an int64 matrix to rank p; return the rows that the ranks sent here, (P, k)."""

    def all_reduce(self, x: Tensor, name: str, operation: str = "sum") -> Tensor:
        """Compute the sum or "max" over the group, in place; return x."""

    def gather(self, x: Tensor, name: str) -> list[Tensor]:
        """Return the tensors, of one shape, of all ranks in order."""


class LocalGroup:
    """A group of one."""

    size, rank = 1, 0

    def all_to_all(self, x: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int], name: str) -> Tensor:
        """Return x."""
        assert list(send_splits) == list(receive_splits) == [x.size(0)], name
        return x

    def exchange_counts(self, counts_Pk: Tensor, name: str) -> Tensor:
        """Return the counts."""
        return counts_Pk

    def all_reduce(self, x: Tensor, name: str, operation: str = "sum") -> Tensor:
        """Return x."""
        return x

    def gather(self, x: Tensor, name: str) -> list[Tensor]:
        """Return x alone."""
        return [x]


class DistributedGroup:
    """The ranks of a torch.distributed process group (gloo on CPU, NCCL on GPU).

    Raises (every method):
        ParallelError: a rank is gone, failed, or took longer than the process group's timeout.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.members = dist.get_process_group_ranks(process_group)
        self.only_cuda = dist.get_backend(process_group) == dist.Backend.NCCL

    def __deepcopy__(self, memo: dict[int, object]) -> DistributedGroup:
        return self  # copies of a model share the connections

    def all_to_all(self, x: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int], name: str) -> Tensor:
        """See :class:`Group`."""
        return AllToAll.apply(x, self, send_splits, receive_splits, name)

    def exchange(self, x: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int], name: str) -> Tensor:
        """Do :meth:`all_to_all` without gradients."""
        if len(send_splits) != self.size or len(receive_splits) != self.size or sum(send_splits) != x.size(0):
            raise ParallelError(
                f"{self._here(name)}: rows of {tuple(x.shape)} cannot be sent in parts of {list(send_splits)} to, with "
                f"{list(receive_splits)} from, {self.size} ranks"
            )
        received = x.new_empty(sum(receive_splits), *x.shape[1:])
        self._run(
            lambda: dist.all_to_all_single(
                received, x.contiguous(), list(receive_splits), list(send_splits), group=self.process_group
            ),
            name,
            f"all-to-all of {tuple(x.shape)} {x.dtype}, parts {list(send_splits)} out and {list(receive_splits)} in",
        )
        return received

    def exchange_counts(self, counts_Pk: Tensor, name: str) -> Tensor:
        """See :class:`Group`."""
        return self.exchange(counts_Pk, [1] * self.size, [1] * self.size, name)

    def all_reduce(self, x: Tensor, name: str, operation: str = "sum") -> Tensor:
        """See :class:`Group`."""
        self._run(
            lambda: dist.all_reduce(x, _OPERATIONS[operation], group=self.process_group),
            name,
            f"all-reduce of {tuple(x.shape)} {x.dtype}",
        )
        return x

    def gather(self, x: Tensor, name: str) -> list[Tensor]:
        """See :class:`Group`."""
        device = x.device
        x = x.contiguous().cuda() if self.only_cuda else x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._run(
            lambda: dist.all_gather(parts, x, group=self.process_group), name, f"gather of {tuple(x.shape)} {x.dtype}"
        )
        return [part.to(device) for part in parts]

    def _here(self, name: str) -> str:
        return f"{name}: rank {self.members[self.rank]} (ranks {self.members})"

    def _run(self, collective: Callable[[], Any], name: str, what: str) -> Any:
        try:
            return collective()
        except RuntimeError as error:
            raise ParallelError.lost(f"{self._here(name)}: {what}", error) from error


class AllToAll(torch.autograd.Function):
    """Send rows to other ranks and receive theirs; gradients go back the way the rows came.

    The node stays in the graph when no row is sent or received, so that every rank runs the same collectives in its
    backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Any, send_splits: Sequence[int], receive_splits: Sequence[int], name: str
    ) -> Tensor:
        ctx.way_back = (group, receive_splits, send_splits, f"{name}, backward")
        ctx.span = current_span()
        # Reading a saved tensor in the backward pass makes activation checkpointing recompute the block, including its
        # collectives, before this node's collective. This keeps the order equal on all ranks, whatever else is saved.
        ctx.save_for_backward(x.new_empty(0))
        return group.exchange(x, send_splits, receive_splits, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        _ = ctx.saved_tensors
        group, send_splits, receive_splits, name = ctx.way_back
        with backward_of(ctx.span):
            return group.exchange(grad, send_splits, receive_splits, name), None, None, None, None


def agree_on_sizes(group: Group, name: str, x: Tensor, sizes_Pk: Tensor) -> list[list[int]]:
    """Tell every rank what it will get from this one, and check that all are at the same place of the model.

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
