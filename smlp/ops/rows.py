"""Rows in another order, and rows summed, with gradients that only look rows up and keep no rows.

Letters: ``N`` rows, ``A`` rows that are summed, ``H`` columns.
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


class PermutedColumns(torch.autograd.Function):
    """``x[b, :, order[b]]`` for every b, where ``inverse`` undoes ``order``."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BnH: Tensor, order_BH: Tensor, inverse_BH: Tensor) -> Tensor:
        ctx.save_for_backward(order_BH, inverse_BH)
        return _columns(x_BnH, order_BH)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_BnH: Tensor) -> tuple[Tensor, None, None]:
        order_BH, inverse_BH = ctx.saved_tensors
        return PermutedColumns.apply(grad_BnH, inverse_BH, order_BH), None, None


def _columns(x_BnH: Tensor, index_BH: Tensor) -> Tensor:
    return x_BnH.gather(2, index_BH.unsqueeze(1).expand(-1, x_BnH.size(1), -1))


def permuted_columns(x_BnH: Tensor, order_BH: Tensor, inverse_BH: Tensor) -> Tensor:
    """Columns of each matrix of a batch in an order of its own.

    Args:
        x_BnH: (B, n, H).
        order_BH: which column comes at each place; every column once, int64.
        inverse_BH: ``order_BH.argsort(dim=1)``.

    Returns:
        (B, n, H).
    """
    if not allowed(x_BnH):
        return _columns(x_BnH, order_BH)
    return PermutedColumns.apply(x_BnH, order_BH, inverse_BH)


class SummedRows(torch.autograd.Function):
    """``zeros.index_add(index, y)``; autograd's own keeps ``y``."""

    @staticmethod
    def forward(ctx: FunctionCtx, y_AH: Tensor, index_A: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index_A)
        return y_AH.new_zeros(num_rows, y_AH.size(1)).index_add_(0, index_A, y_AH)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_NH: Tensor) -> tuple[Tensor, None, None]:
        (index_A,) = ctx.saved_tensors
        return grad_NH.index_select(0, index_A), None, None


def summed_rows(y_AH: Tensor, index_A: Tensor, num_rows: int) -> Tensor:
    """Sums of the rows that share an index.

    Args:
        y_AH: (A, H).
        index_A: row of the result to which each belongs, (A,), int64.
        num_rows: N.

    Returns:
        (N, H); zeros where nothing belongs.
    """
    if not allowed(y_AH):
        return y_AH.new_zeros(num_rows, y_AH.size(1)).index_add_(0, index_A, y_AH)
    return SummedRows.apply(y_AH, index_A, num_rows)


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
