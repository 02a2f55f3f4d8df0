"""Rows in another order, where every row is taken exactly once: backward is a look-up too, not a sum.

Letters: ``N`` rows, ``H`` columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from smlp.ops.fast_paths import allowed


class PermutedRows(torch.autograd.Function):
    """``x[order]``, where ``inverse`` undoes ``order``."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_NH: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N, inverse_N)
        return x_NH.index_select(0, order_N)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_NH: Tensor) -> tuple[Tensor, None, None]:
        order_N, inverse_N = ctx.saved_tensors
        return PermutedRows.apply(grad_NH, inverse_N, order_N), None, None


def permuted_rows(x_NH: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Rows in the given order.

    Args:
        x_NH: (N, H).
        order_N: which row comes at each place; every row once, int64.
        inverse_N: where each row goes: ``inverse_N[order_N[i]] == i``.

    Returns:
        ``x_NH[order_N]``, (N, H).
    """
    if not allowed(x_NH):
        return x_NH.index_select(0, order_N)
    return PermutedRows.apply(x_NH, order_N, inverse_N)
