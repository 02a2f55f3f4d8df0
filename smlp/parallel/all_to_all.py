"""The one all-to-all that gradients pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smlp.parallel.spans import backward_of, current_span


class AllToAll(torch.autograd.Function):
    """Rows to other ranks and rows from them; gradients go back the way the rows came.

    The node stays in the graph when no row is sent or received, so that every rank runs the same collectives in its
    backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Any, send_splits: Sequence[int], receive_splits: Sequence[int], name: str
    ) -> Tensor:
        ctx.way_back = (group, receive_splits, send_splits, f"{name}, backward")
        ctx.span = current_span()
        # Reading a saved tensor in the backward pass makes activation checkpointing compute the block again, with its
        # collectives, before this node's collective: on every rank, whatever else the block has saved there.
        ctx.save_for_backward(x.new_empty(0))
        return group.exchange(x, send_splits, receive_splits, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        _ = ctx.saved_tensors
        group, send_splits, receive_splits, name = ctx.way_back
        with backward_of(ctx.span):
            return group.exchange(grad, send_splits, receive_splits, name), None, None, None, None
