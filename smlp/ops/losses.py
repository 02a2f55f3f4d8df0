"""Cross-entropy of next tokens that keeps only the logits, and allocates one tensor of their size: their gradient.

A vocabulary has tens of thousands of tokens, and a training step is as short of memory as of time: log-probabilities,
their gradient and that of the logits would be three more tensors. Here probabilities are computed for some rows at a
time, once forward and once backward, and stay in the cache.

Letters: ``N`` positions, ``V`` vocabulary, ``r`` positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smlp.errors import UserError
from smlp.ops.fast_paths import first_order_only, loses_by_rows, rows_of_logits

_NO_INDEX = -(1 << 40)  # no target is ignored, as -100 is by torch's default


def token_losses(logits: Tensor, target: Tensor, ignored: int | None = None) -> Tensor:
    """Return the negative natural log-likelihood of each target, in float32 or, of logits in float64, in float64.

    Args:
        logits: (..., V).
        target: ids, (...).
        ignored: the id of targets that do not count, of the vocabulary or not: their loss is 0. None if all count.

    Returns:
        (...), float32 or float64.

    Raises:
        UserError: there are not as many targets as rows of logits.
    """
    logits_NV, target_N = logits.reshape(-1, logits.size(-1)), target.flatten()
    if not torch.compiler.is_compiling() and len(logits_NV) != len(target_N):  # it would fix the sizes of a graph
        raise UserError(f"logits have {len(logits_NV)} rows, but there are {len(target_N)} targets")
    if ignored is not None:
        is_ignored_N = target_N == ignored
        target_N = target_N.masked_fill(is_ignored_N, 0)  # it may be no index, such as -100
    if loses_by_rows(logits_NV):
        losses_N = _TokenLosses.apply(logits_NV, target_N)
    else:
        wide_NV = logits_NV.to(_wide(logits.dtype))
        losses_N = F.cross_entropy(wide_NV, target_N, reduction="none", ignore_index=_NO_INDEX)
    if ignored is not None:
        losses_N = losses_N.masked_fill(is_ignored_N, 0.0)
    return losses_N.view(target.shape)


class _TokenLosses(torch.autograd.Function):
    """Losses (N,) from logits (N, V) and targets (N,)."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor) -> Tensor:
        ctx.save_for_backward(logits_NV, target_N)
        wide, num_rows = _wide(logits_NV.dtype), rows_of_logits(logits_NV)
        losses_N = logits_NV.new_empty(len(target_N), dtype=wide)
        for logits_rV, target_r, losses_r in _split(num_rows, logits_NV, target_N, losses_N):
            log_probs_rV = torch.log_softmax(logits_rV, dim=1, dtype=wide)
            torch.neg(log_probs_rV.gather(1, target_r.unsqueeze(1)).squeeze(1), out=losses_r)
        return losses_N

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        logits_NV, target_N = ctx.saved_tensors
        wide, num_rows = _wide(logits_NV.dtype), rows_of_logits(logits_NV)
        grad_NV = torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
        for logits_rV, target_r, grad_r, out_rV in _split(num_rows, logits_NV, target_N, grad_N, grad_NV):
            # in place if the logits have the precision
            made_rV = out_rV if out_rV.dtype == wide else torch.empty_like(out_rV, dtype=wide)
            torch.softmax(logits_rV, dim=1, dtype=wide, out=made_rV)
            made_rV.scatter_add_(1, target_r.unsqueeze(1), made_rV.new_full((len(target_r), 1), -1.0))
            out_rV.copy_(made_rV.mul_(grad_r.unsqueeze(1)))
        return grad_NV, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _split(num_rows: int, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(value.split(num_rows) for value in values), strict=True)
