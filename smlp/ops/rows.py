"""Permute, sum and count rows; gradients only gather rows and keep none.

Letters: ``N`` rows, ``A`` rows that are summed, ``H`` columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smlp.ops.fast_paths import allowed, is_traced

_Take = Callable[[Tensor, Tensor], Tensor]


class _Permuted(torch.autograd.Function):
    """``take(x, order)``, where ``inverse`` undoes ``order``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, take: _Take) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.take = take
        return take(x, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        return _Permuted.apply(grad, inverse, order, ctx.take), None, None, None


def _permuted(x: Tensor, order: Tensor, inverse: Tensor, take: _Take) -> Tensor:
    return _Permuted.apply(x, order, inverse, take) if allowed(x) else take(x, order)


def _rows(x_NH: Tensor, index_N: Tensor) -> Tensor:
    return x_NH.index_select(0, index_N)


def _columns(x_BnH: Tensor, index_BH: Tensor) -> Tensor:
    return x_BnH.gather(2, index_BH.unsqueeze(1).expand(-1, x_BnH.size(1), -1))


def permuted_columns(x_BnH: Tensor, order_BH: Tensor, inverse_BH: Tensor) -> Tensor:
    """Permute the columns of each matrix of a batch, each in its own order.

    Args:
        x_BnH: (B, n, H).
        order_BH: which column comes at each place; every column once, int64.
        inverse_BH: ``order_BH.argsort(dim=1)``.

    Returns:
        (B, n, H).
    """
    return _permuted(x_BnH, order_BH, inverse_BH, _columns)


def _sums(y_AH: Tensor, index_A: Tensor, num_rows: int) -> Tensor:
    return y_AH.new_zeros(num_rows, y_AH.size(1)).index_add_(0, index_A, y_AH)


class _SummedRows(torch.autograd.Function):
    """``zeros.index_add(index, y)``; autograd's own keeps ``y``."""

    @staticmethod
    def forward(ctx: Any, y_AH: Tensor, index_A: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index_A)
        return _sums(y_AH, index_A, num_rows)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None, None]:
        (index_A,) = ctx.saved_tensors
        return grad_NH.index_select(0, index_A), None, None


def summed_rows(y_AH: Tensor, index_A: Tensor, num_rows: int) -> Tensor:
    """Sum the rows that share an index.

    Args:
        y_AH: (A, H).
        index_A: row of the result to which each belongs, (A,), int64.
        num_rows: N.

    Returns:
        (N, H); zeros where nothing belongs.
    """
    return _SummedRows.apply(y_AH, index_A, num_rows) if allowed(y_AH) else _sums(y_AH, index_A, num_rows)


def permuted_rows(x_NH: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Return the rows in the given order.

    Args:
        x_NH: (N, H).
        order_N: which row comes at each place; every row once, int64.
        inverse_N: where each row goes: ``inverse_N[order_N[i]] == i``.

    Returns:
        ``x_NH[order_N]``, (N, H).
    """
    return _permuted(x_NH, order_N, inverse_N, _rows)


def occurrences(number_Q: Tensor, num_kinds: int) -> Tensor:
    """Return how often each of the numbers 0 .. K-1 occurs among some, (Q,) to (K,), int64."""
    if is_traced():  # the size of what bincount returns depends on the values
        return (number_Q.unsqueeze(1) == torch.arange(num_kinds, device=number_Q.device)).sum(dim=0)
    if number_Q.is_cuda:  # for which bincount waits
        return number_Q.new_zeros(num_kinds).scatter_add_(0, number_Q, torch.ones_like(number_Q))
    return torch.bincount(number_Q, minlength=num_kinds)
