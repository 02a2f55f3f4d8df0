"""An all-to-all in chunks, so that one chunk travels while another is computed; gradients pass through it.

Every way has two ends: :func:`begin` hands rows over and does not wait, :func:`end` waits for what comes. In the
backward pass the end begins and the beginning ends. All ranks must begin the same exchanges in the same order, in both
passes, or they wait for each other for ever. Program order decides in the forward pass; so that it does in the backward
pass too, whatever autograd would rather do first, each call depends on the one before through an empty tensor, the
``order``, that all of them pass on.

Letters: ``C`` chunks, ``P`` ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smlp.parallel.group import DistributedGroup, Wait
from smlp.parallel.spans import backward_of, current_span


class Way:
    """Rows of all chunks on their way in one direction.

    What is held: all chunks' rows to be sent until they are waited for, and room for all rows to come from the first
    beginning on.

    Args:
        group: the ranks.
        send_CP: rows of each chunk for each rank.
        receive_CP: rows of each chunk from each rank.
        together: the rows to come are wanted in one tensor, chunk after chunk; otherwise in one for each chunk.
        name: what it is, for error messages.
    """

    def __init__(
        self,
        group: DistributedGroup,
        send_CP: Sequence[Sequence[int]],
        receive_CP: Sequence[Sequence[int]],
        together: bool,
        name: str,
    ) -> None:
        self.group, self.send_CP, self.receive_CP, self.name = group, send_CP, receive_CP, name
        self.together = together
        self._room: Sequence[Tensor] | None = None
        self._whole: Tensor | None = None
        self._waits: dict[int, Wait] = {}

    def begin(self, x: Tensor, chunks: Sequence[int], last_first: bool = False) -> None:
        """Sends rows x, which lie chunk after chunk; the first chunk leaves first, or the last one."""
        parts = list(zip(chunks, x.split([sum(self.send_CP[chunk]) for chunk in chunks]), strict=True))
        for chunk, rows in reversed(parts) if last_first else parts:
            name = f"{self.name}, chunk {chunk + 1} of {len(self.send_CP)}"
            into = self._rooms_like(x)[chunk] if self.together else None
            self._waits[chunk] = self.group.begin(rows, self.send_CP[chunk], self.receive_CP[chunk], name, into)

    def end(self, chunks: Sequence[int]) -> Tensor:
        """Waits for these chunks (for all, if they are wanted together), and returns their rows."""
        arrived = [self._waits.pop(chunk)() for chunk in chunks]
        if not self.together:
            (rows,) = arrived
            return rows
        whole, self._whole, self._room = self._whole, None, None
        return whole

    def _rooms_like(self, x: Tensor) -> Sequence[Tensor]:
        if self._room is None:
            sizes = [sum(receive_P) for receive_P in self.receive_CP]
            self._whole = x.new_empty(sum(sizes), *x.shape[1:])
            self._room = self._whole.split(sizes)
        return self._room


class Trip:
    """One way, and the way of the gradients; see :class:`Way`.

    Args:
        group, send_CP, receive_CP, name: as for :class:`Way`.
        splits: rows leave in one tensor and arrive in one for each chunk; otherwise the other way round.
    """

    def __init__(
        self,
        group: DistributedGroup,
        send_CP: Sequence[Sequence[int]],
        receive_CP: Sequence[Sequence[int]],
        splits: bool,
        name: str,
    ) -> None:
        self.forth = Way(group, send_CP, receive_CP, not splits, name)
        self.back = Way(group, receive_CP, send_CP, splits, f"{name}, backward")
        #: whether the rows that travel forth want gradients
        self.has_gradients = False


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, trip: Trip, chunks: Sequence[int]) -> Tensor:
        ctx.trip, ctx.chunks, ctx.span = trip, chunks, current_span()
        trip.has_gradients = ctx.needs_input_grad[0]
        trip.forth.begin(x, chunks)
        return order.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_order: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        if not ctx.trip.has_gradients:
            return None, grad_order, None, None
        with backward_of(ctx.span):
            return ctx.trip.back.end(ctx.chunks), grad_order, None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, order: Tensor, trip: Trip, chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
        ctx.trip, ctx.chunks, ctx.span = trip, chunks, current_span()
        rows = trip.forth.end(chunks)
        if not trip.has_gradients:
            ctx.mark_non_differentiable(rows)
        # as in AllToAll: a block that is computed again is so before its gradients travel, and up to its last exchange
        ctx.save_for_backward(order.new_empty(0))
        return rows, order.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_order: Tensor) -> tuple[Tensor, None, None]:
        _ = ctx.saved_tensors
        if ctx.trip.has_gradients:
            with backward_of(ctx.span):
                # the experts of the last chunk are the first to be passed on the way back
                ctx.trip.back.begin(grad, ctx.chunks, last_first=True)
        return grad_order, None, None


def start_of_order(x: Tensor) -> Tensor:
    """The first ``order`` of a layer with these inputs."""
    return x.new_empty(0)


def begin(x: Tensor, order: Tensor, trip: Trip, chunks: Sequence[int]) -> Tensor:
    """Sends rows x of some chunks and does not wait; returns the next order."""
    return _Begin.apply(x, order, trip, chunks)


def end(order: Tensor, trip: Trip, chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Waits for some chunks; returns their rows, which carry gradients, and the next order."""
    return _End.apply(order, trip, chunks)
