"""Linear maps: for few rows (a token of a sequence that is being written) by bands, for many by the faster library.

Letters: ``N`` rows, ``I`` and ``O`` features in and out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from smlp.ops import onednn
from smlp.ops.bands import rows_by_bands
from smlp.ops.fast_paths import BANDS, takes_bands, takes_onednn


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``W x + b`` over the last axis of x, (..., I) to (..., O), as :func:`torch.nn.functional.linear`."""
    if takes_bands(x, weight_OI, bias_O):
        return few_rows(x, weight_OI, bias_O)
    if takes_onednn(x.numel() * weight_OI.size(0), x, weight_OI, *(() if bias_O is None else (bias_O,))):
        return _OneDnnLinear.apply(x.reshape(-1, x.size(-1)), weight_OI, bias_O).view(*x.shape[:-1], -1)
    return F.linear(x, weight_OI, bias_O)


def few_rows(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """:func:`linear` where :func:`smlp.ops.fast_paths.takes_bands` says so."""
    bands = math.gcd(weight_OI.size(0), BANDS)
    out_ON = rows_by_bands(weight_OI, x.reshape(-1, x.size(-1)), bands, bias_O)
    return out_ON.t().reshape(*x.shape[:-1], -1)


class _OneDnnLinear(torch.autograd.Function):
    """:func:`linear` of rows, (N, I) to (N, O), where :func:`smlp.ops.fast_paths.takes_onednn` says so."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return onednn.mapped(x_NI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            onednn.product(grad_NO, weight_OI) if wants_x else None,
            onednn.outer(grad_NO, x_NI).contiguous() if wants_weight else None,
            grad_NO.sum(dim=0) if wants_bias else None,
        )
