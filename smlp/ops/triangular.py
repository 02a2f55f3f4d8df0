"""Products with lower triangular matrices that skip the empty half, forward and backward.

The triangle is cut into strips of b rows (or columns) that end at the diagonal. ``(T + b) / 2T`` of the dense product's
work is left, in few, large products: one call of the library multiplies a strip of all matrices. On a CPU each call
starts and joins all threads, which is cheap on an idle machine and slow next to other busy programs.

Letters: ``n`` positions, ``b`` of them in a strip, ``k`` that a strip reads, ``G`` products at a time, ``c`` columns of
each, ``h`` matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smlp.ops import onednn
from smlp.ops.fast_paths import first_order_only, takes_onednn


class TriangularProjection(torch.autograd.Function):
    """``tril(W_i) @ x_i + b_i`` for every head i, in strips of ``width`` positions.

    Shapes are those of :func:`smlp.ops.causal_spatial_projection`.
    One matrix multiplies the sequences where they lie; with several, each matrix multiplies all sequences side by side.
    """

    @staticmethod
    def forward(ctx: Any, x_Bnhc: Tensor, weight_hTT: Tensor, bias_hT: Tensor, width: int) -> Tensor:
        x_Gnc = _grouped(x_Bnhc)
        strips = []
        for first, last in _spans(x_Gnc.size(1), width):
            rows_hbk = weight_hTT[:, first:last, :last].tril(first)
            strips.append(_product(rows_hbk, x_Gnc[:, :last], plus=bias_hT[:, first:last, None]))
        ctx.save_for_backward(x_Gnc, weight_hTT)
        ctx.shape, ctx.bias_shape, ctx.width = x_Bnhc.shape, bias_hT.shape, width
        return _ungrouped(torch.cat(strips, dim=1), x_Bnhc.shape)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_Bnhc: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_Gnc, weight_hTT = ctx.saved_tensors
        grad_Gnc = _grouped(grad_Bnhc)
        num_positions = x_Gnc.size(1)
        grad_weight_hTT = torch.zeros_like(weight_hTT)
        strips = []
        for first, last in _spans(num_positions, ctx.width):
            columns_hkb = weight_hTT[:, first:num_positions, first:last].tril()
            strips.append(_product(columns_hkb.transpose(1, 2), grad_Gnc[:, first:]))
            grad_rows_hbk = _outer(grad_Gnc[:, first:last], x_Gnc[:, :last], len(weight_hTT))
            grad_weight_hTT[:, first:last, :last] = grad_rows_hbk.tril_(first)
        grad_bias_hT = weight_hTT.new_zeros(ctx.bias_shape)  # of T, though matrices may be n x n (Toeplitz)
        grad_bias_Gn = grad_Gnc.sum(dim=2)
        grad_bias_hT[:, :num_positions] = grad_bias_Gn.sum(dim=0) if ctx.shape[2] == 1 else grad_bias_Gn
        return _ungrouped(torch.cat(strips, dim=1), ctx.shape), grad_weight_hTT, grad_bias_hT, None


def _spans(num_positions: int, width: int) -> list[tuple[int, int]]:
    """Return the first and last + 1 position of each strip."""
    return [(first, min(first + width, num_positions)) for first in range(0, num_positions, width)]


def _grouped(x_Bnhc: Tensor) -> Tensor:
    """Return (B, n, c) of one head, as it lies; (h, n, B*c) of several, copied."""
    if x_Bnhc.size(2) == 1:
        return x_Bnhc.squeeze(2).contiguous()
    return x_Bnhc.permute(2, 1, 0, 3).flatten(2)


def _ungrouped(x_Gnc: Tensor, shape: torch.Size) -> Tensor:
    """Invert :func:`_grouped`, as a view of shape (B, n, h, c)."""
    num_seqs, num_positions, num_heads, width = shape
    if num_heads == 1:
        return x_Gnc.unsqueeze(2)
    return x_Gnc.view(num_heads, num_positions, num_seqs, width).permute(2, 1, 0, 3)


def _product(left_hmk: Tensor, right_Gkc: Tensor, plus: Tensor | None = None) -> Tensor:
    """Return ``left @ right + plus``, (G, m, c), a new tensor: torch fills one with gaps matrix by matrix."""
    left_Gmk = left_hmk.expand(len(right_Gkc), -1, -1)
    if takes_onednn(left_hmk.size(1) * right_Gkc.shape[1:].numel(), left_hmk, right_Gkc):
        product_Gmc = right_Gkc.new_empty(len(right_Gkc), left_hmk.size(1), right_Gkc.size(2))
        for left_mk, right_kc, product_mc in zip(left_Gmk, right_Gkc, product_Gmc, strict=True):
            product_mc.copy_(onednn.product(left_mk, right_kc))
        return product_Gmc if plus is None else product_Gmc.add_(plus)
    return torch.bmm(left_Gmk, right_Gkc) if plus is None else torch.baddbmm(plus, left_Gmk, right_Gkc)


def _outer(left_Gmc: Tensor, right_Gkc: Tensor, num_matrices: int) -> Tensor:
    """Return ``left @ right^T``, (h, m, k); summed over the products where they share one matrix."""
    if num_matrices == len(left_Gmc):
        return _product(left_Gmc, right_Gkc.transpose(1, 2))
    is_half = left_Gmc.dtype.itemsize == 2  # in which the sum would be rounded after every sequence
    sum_1mk = left_Gmc.new_zeros(1, left_Gmc.size(1), right_Gkc.size(1), dtype=torch.float32 if is_half else None)
    for number in range(len(left_Gmc)):
        one = slice(number, number + 1)
        pair = left_Gmc[one], right_Gkc[one].transpose(1, 2)
        sum_1mk = sum_1mk.add_(_product(*pair)) if is_half else _product(*pair, plus=sum_1mk)
    return sum_1mk.to(left_Gmc.dtype)
