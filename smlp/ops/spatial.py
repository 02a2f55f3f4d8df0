"""Spatial projections: the linear maps over the token axis in spatial gating units and sMoE experts.

In a causal projection no position sees a later one; in the other one every position sees all. The matrices are free, or
Toeplitz matrices made of one vector.

Long inputs skip the empty half of the product (:mod:`smlp.ops.triangular`); on NVIDIA GPUs one kernel does it all, bias
and gate included (:mod:`smlp.ops.triton_spatial`).

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``h`` heads or experts, ``c`` features of one head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smlp.errors import UserError
from smlp.ops.fast_paths import BANDS, allowed, fuse, is_traced, reads_in_place, triangle_strip
from smlp.ops.first_use import fused_projection
from smlp.ops.functional import columns_by_bands
from smlp.ops.triangular import TriangularProjection


def causal_spatial_projection(
    x_Bnhc: Tensor,
    weight_hTT: Tensor,
    bias_hT: Tensor,
    start: int = 0,
    gate_Bmhc: Tensor | None = None,
    is_lower: bool = False,
) -> Tensor:
    """Return ``(tril(W_i) @ x_i + b_i) * gate_i`` for every head i, over the tokens (Liu et al., 2021, eq. 2, causal).

    Inputs shorter than T use the leading rows and columns of ``W`` and the leading entries of ``b``.

    Args:
        x_Bnhc: features of positions 0 .. n-1, (B, n, h, c).
        weight_hTT: (h, T, T); entries above the diagonal have no influence and get zero gradients.
        bias_hT: (h, T).
        start: first position whose output is wanted; earlier ones are only read (incremental decoding).
        gate_Bmhc: what each output is multiplied with, (B, n - start, h, c), or None for nothing.
        is_lower: whether all entries above the diagonal are zeros, whose gradients nobody reads; saves time.

    Returns:
        (B, n - start, h, c), outputs of positions start .. n-1.

    Raises:
        UserError: x has not as many heads as the weights.
    """
    _check_heads(x_Bnhc, weight_hTT)
    given = (x_Bnhc, weight_hTT, bias_hT) if gate_Bmhc is None else (x_Bnhc, weight_hTT, bias_hT, gate_Bmhc)
    if fuse(x_Bnhc.size(1), start, *given):
        out_Bnhc = fused_projection(x_Bnhc, weight_hTT, bias_hT, gate_Bmhc)
        if out_Bnhc is not None:
            return out_Bnhc
    out_Bmhc = _projection(x_Bnhc, weight_hTT, bias_hT, start, is_lower)
    return out_Bmhc if gate_Bmhc is None else gate_Bmhc * out_Bmhc


def spatial_projection(x_Bnhc: Tensor, weight_hTT: Tensor, bias_hT: Tensor, gate_Bnhc: Tensor | None = None) -> Tensor:
    """Return ``(W_i @ x_i + b_i) * gate_i`` for every head i; each position sees all others (Liu et al., 2021, eq. 2).

    Inputs shorter than T use the leading rows and columns of ``W`` and the leading entries of ``b``.

    Args:
        x_Bnhc: features, (B, n, h, c).
        weight_hTT: (h, T, T).
        bias_hT: (h, T).
        gate_Bnhc: what each output is multiplied with, or None for nothing.

    Returns:
        (B, n, h, c).

    Raises:
        UserError: x has not as many heads as the weights.
    """
    _check_heads(x_Bnhc, weight_hTT)
    num_seqs, num_tokens, num_heads, width = x_Bnhc.shape
    weight_hnn, bias_hn1 = weight_hTT[:, :num_tokens, :num_tokens], bias_hT[:, :num_tokens, None]
    if num_heads == 1:  # one sequence at a time: nothing is copied
        over_seqs = (num_seqs, -1, -1)
        out_Bnc = torch.baddbmm(bias_hn1.expand(over_seqs), weight_hnn.expand(over_seqs), x_Bnhc.squeeze(2))
        out_Bnhc = out_Bnc.unsqueeze(2)
    else:
        x_hnBc = x_Bnhc.permute(2, 1, 0, 3).reshape(num_heads, num_tokens, num_seqs * width)
        out_hnBc = torch.baddbmm(bias_hn1, weight_hnn, x_hnBc)
        out_Bnhc = out_hnBc.view(num_heads, num_tokens, num_seqs, width).permute(2, 1, 0, 3)
    return out_Bnhc if gate_Bnhc is None else gate_Bnhc * out_Bnhc


def _check_heads(x_Bnhc: Tensor, weight_hTT: Tensor) -> None:
    if x_Bnhc.size(2) != weight_hTT.size(0):  # with one head, the others would be taken for those of other sequences
        raise UserError(f"x_Bnhc has {x_Bnhc.size(2)} heads, but weight_hTT has {weight_hTT.size(0)}")


def toeplitz_matrices(w_hL: Tensor, num_tokens: int) -> Tensor:
    """Return ``W_i[a, b] = w_i[T - 1 + b - a]``, matrices of distances alone (Liu et al., 2021, appendix C).

    Args:
        w_hL: (h, 2T-1): of the distances -(T-1) .. T-1.
        num_tokens: n <= T; the distances within n positions are the central 2n-1 of w.

    Returns:
        (h, n, n).

    Raises:
        UserError: n is more than T, or there are tokens and w has an even length.
    """
    if not is_traced() and num_tokens and w_hL.size(1) % 2 == 0:  # of no tokens, w may be empty
        raise UserError(f"w_hL must have 2T - 1 numbers for each head, got {w_hL.size(1)}")
    first = (w_hL.size(1) + 1) // 2 - num_tokens
    if not is_traced() and first < 0:  # in a graph, it would fix the sizes
        raise UserError(f"w_hL has the distances of {(w_hL.size(1) + 1) // 2} positions, but {num_tokens} are wanted")
    central_hL = w_hL[:, first : first + 2 * num_tokens - 1]
    if is_traced():  # unfold holds for one length only
        place_n = torch.arange(num_tokens, device=w_hL.device)
        return central_hL[:, place_n - place_n[:, None] + (num_tokens - 1)]
    if (w_hL.is_cuda or w_hL.dtype.itemsize == 2) and num_tokens > 1:
        return _by_shearing(central_hL, num_tokens)
    return central_hL.unfold(1, num_tokens, 1)[:, :num_tokens].flip(1)  # of no tokens, unfold makes a row


def _by_shearing(central_hL: Tensor, num_tokens: int) -> Tensor:
    """Return the same matrices, cut from n copies of w in rows that are one number shorter than w.

    Its gradient is a sum over rows. On a GPU, that of ``unfold`` takes many times as long; on a CPU it is faster, but
    rounds to 16 bits after each number.
    """
    num_heads, length = central_hL.shape
    repeated_hX = central_hL.unsqueeze(1).expand(-1, num_tokens, -1).reshape(num_heads, num_tokens * length)
    first, size = num_tokens - 1, num_tokens * (length - 1)
    rows_hnk = repeated_hX[:, first : first + size].view(num_heads, num_tokens, length - 1)
    return rows_hnk[:, :, :num_tokens].contiguous()  # rows at other distances take products twice as long


def _projection(x_Bnhc: Tensor, weight_hTT: Tensor, bias_hT: Tensor, start: int, is_lower: bool) -> Tensor:
    """Return a causal projection without a gate, by torch's own products."""
    num_seqs, num_tokens, num_heads, width = x_Bnhc.shape
    if start == 0 and x_Bnhc.is_cuda:
        return spatial_projection(x_Bnhc, weight_hTT if is_lower else weight_hTT.tril(), bias_hT)
    strip = triangle_strip(num_tokens) if start == 0 and allowed(x_Bnhc, weight_hTT, bias_hT) else None
    if strip is not None:
        return TriangularProjection.apply(x_Bnhc, weight_hTT, bias_hT, strip)
    weight_hmn = weight_hTT[:, start:num_tokens, :num_tokens]
    if num_tokens - start > 1 and not is_lower:  # a single last row has nothing above the diagonal
        weight_hmn = weight_hmn.tril(diagonal=start)
    bias_hm1 = bias_hT[:, start:num_tokens, None]
    if reads_in_place(x_Bnhc, start):
        seqs = [_sequence(x_nhc.transpose(0, 1), weight_hmn, bias_hm1) for x_nhc in x_Bnhc]
        return torch.stack(seqs).transpose(1, 2)
    x_hnBc = x_Bnhc.permute(2, 1, 0, 3).reshape(num_heads, num_tokens, num_seqs * width)
    out_hmBc = torch.baddbmm(bias_hm1, weight_hmn, x_hnBc)
    return out_hmBc.view(num_heads, num_tokens - start, num_seqs, width).permute(2, 1, 0, 3)


def _sequence(x_hnc: Tensor, weight_hmn: Tensor, bias_hm1: Tensor) -> Tensor:
    """Return the last m positions of one sequence, (h, m, c); a single product is cut to give all threads a part."""
    (num_heads, num_new, num_tokens), bands = weight_hmn.shape, BANDS
    if num_heads > 1 or num_new != 1 or num_tokens < bands:
        return torch.baddbmm(bias_hm1, weight_hmn, x_hnc)
    whole = num_tokens - num_tokens % bands
    sums_1c = columns_by_bands(x_hnc[0, :whole], weight_hmn[0, 0, :whole], bands)
    rest_h1c = torch.baddbmm(bias_hm1, weight_hmn[:, :, whole:], x_hnc[:, whole:])
    return rest_h1c + sums_1c
