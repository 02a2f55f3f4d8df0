"""Products with lower triangular matrices that skip the empty half, forward and backward.

The triangle is halved again and again: two smaller triangles on the diagonal and a full square below them, down to
leaves. With leaves of b positions, ``(T + b) / 2T`` of the dense product's work is left, in few and large products.

Letters: ``n`` positions, ``G`` products at a time, ``c`` columns of each, ``h`` matrices.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from smlp.ops import onednn
from smlp.ops.fast_paths import takes_onednn

Span = tuple[int, int]


@lru_cache(maxsize=256)
def halved(num_positions: int, leaf: int) -> tuple[list[Span], list[tuple[Span, Span]]]:
    """Triangles on the diagonal, first and last + 1, and squares below them, (rows, columns); together all of it."""
    triangles: list[Span] = []
    squares: list[tuple[Span, Span]] = []

    def divide(first: int, last: int) -> None:
        if last - first <= leaf:
            triangles.append((first, last))
            return
        num_leaves = -(-(last - first) // leaf)
        middle = first + leaf * ((num_leaves + 1) // 2)
        divide(first, middle)
        divide(middle, last)
        squares.append(((middle, last), (first, middle)))

    divide(0, num_positions)
    return triangles, squares


class TriangularProjection(torch.autograd.Function):
    """``tril(W_i) @ x_i + b_i`` for every head i, with blocks of ``leaf`` positions on the diagonal.

    Shapes are those of :func:`smlp.ops.causal_spatial_projection`.
    One matrix multiplies the sequences where they lie; several take the sequences side by side, each its own columns.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x_Bnhc: Tensor, weight_hTT: Tensor, bias_hT: Tensor, leaf: int) -> Tensor:
        x_Gnc = _grouped(x_Bnhc)
        num_groups, num_positions, _ = x_Gnc.shape
        weight_GTT = weight_hTT.expand(num_groups, -1, -1)
        bias_Gn1 = bias_hT[:, :num_positions, None]
        out_Gnc = torch.empty_like(x_Gnc)
        triangles, squares = halved(num_positions, leaf)
        for first, last in triangles:
            own = slice(first, last)
            _multiply(_triangle(weight_hTT, own, num_groups), x_Gnc[:, own], out_Gnc[:, own], plus=bias_Gn1[:, own])
        for rows, columns in squares:
            below, above = slice(*rows), slice(*columns)
            _multiply(weight_GTT[:, below, above], x_Gnc[:, above], out_Gnc[:, below], plus=out_Gnc[:, below])
        ctx.save_for_backward(x_Gnc, weight_hTT)
        ctx.shape, ctx.leaf = x_Bnhc.shape, leaf
        return _ungrouped(out_Gnc, x_Bnhc.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_Bnhc: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_Gnc, weight_hTT = ctx.saved_tensors
        grad_Gnc = _grouped(grad_Bnhc)
        num_groups, num_positions, _ = x_Gnc.shape
        grad_x_Gnc = torch.empty_like(x_Gnc)
        grad_weight_hTT = torch.empty_like(weight_hTT)
        grad_weight_hTT[:, num_positions:].zero_()
        weight_GTT = weight_hTT.expand(num_groups, -1, -1)
        triangles, squares = halved(num_positions, ctx.leaf)
        for first, last in triangles:
            own = slice(first, last)
            transposed = _triangle(weight_hTT, own, num_groups).transpose(1, 2)
            _multiply(transposed, grad_Gnc[:, own], grad_x_Gnc[:, own])
            _outer(grad_Gnc[:, own], x_Gnc[:, own], grad_weight_hTT[:, own, own])
            grad_weight_hTT[:, own, own].tril_()
            grad_weight_hTT[:, own, last:].zero_()
        for rows, columns in squares:
            below, above = slice(*rows), slice(*columns)
            transposed = weight_GTT[:, below, above].transpose(1, 2)
            _multiply(transposed, grad_Gnc[:, below], grad_x_Gnc[:, above], plus=grad_x_Gnc[:, above])
            _outer(grad_Gnc[:, below], x_Gnc[:, above], grad_weight_hTT[:, below, above])
        grad_bias_hT = torch.zeros_like(weight_hTT[:, 0])
        grad_bias_Gn = grad_Gnc.sum(dim=2)
        grad_bias_hT[:, :num_positions] = grad_bias_Gn.sum(dim=0) if ctx.shape[2] == 1 else grad_bias_Gn
        return _ungrouped(grad_x_Gnc, ctx.shape), grad_weight_hTT, grad_bias_hT, None


def _grouped(x_Bnhc: Tensor) -> Tensor:
    """(B, n, c) of one head, as it lies; (h, n, B*c) of several, copied."""
    if x_Bnhc.size(2) == 1:
        return x_Bnhc.squeeze(2).contiguous()
    return x_Bnhc.permute(2, 1, 0, 3).flatten(2)


def _ungrouped(x_Gnc: Tensor, shape: torch.Size) -> Tensor:
    """The inverse, as a view of shape (B, n, h, c)."""
    num_seqs, num_positions, num_heads, width = shape
    if num_heads == 1:
        return x_Gnc.unsqueeze(2)
    return x_Gnc.view(num_heads, num_positions, num_seqs, width).permute(2, 1, 0, 3)


def _triangle(weight_hTT: Tensor, own: slice, num_groups: int) -> Tensor:
    """A diagonal block without what is above the diagonal, for each product."""
    return weight_hTT[:, own, own].tril().expand(num_groups, -1, -1)


def _multiply(left_Gmn: Tensor, right_Gnc: Tensor, out_Gmc: Tensor, plus: Tensor | None = None) -> None:
    """``left @ right + plus`` into ``out``, which may be ``plus``."""
    if takes_onednn(left_Gmn.size(1) * right_Gnc.shape[1:].numel(), left_Gmn, right_Gnc):
        plus_Gmc = None if plus is None else plus.expand_as(out_Gmc)
        for number, (left_mn, right_nc, out_mc) in enumerate(zip(left_Gmn, right_Gnc, out_Gmc, strict=True)):
            product_mc = onednn.product(left_mn, right_nc)
            if plus_Gmc is None:
                out_mc.copy_(product_mc)
            else:
                torch.add(plus_Gmc[number], product_mc, out=out_mc)
    elif plus is None:
        torch.bmm(left_Gmn, right_Gnc, out=out_Gmc)
    else:
        torch.baddbmm(plus, left_Gmn, right_Gnc, out=out_Gmc)


def _outer(left_Gmc: Tensor, right_Gnc: Tensor, out_hmn: Tensor) -> None:
    """``left @ right^T`` into ``out``; summed over the products where they share one matrix."""
    if out_hmn.size(0) == left_Gmc.size(0):
        _multiply(left_Gmc, right_Gnc.transpose(1, 2), out_hmn)
        return
    if left_Gmc.size(0) == 0:
        out_hmn.zero_()
    for number in range(left_Gmc.size(0)):
        one = slice(number, number + 1)
        _multiply(left_Gmc[one], right_Gnc[one].transpose(1, 2), out_hmn, plus=out_hmn if number else None)
