"""Faster versions of three functions of :mod:`torch.nn.functional`: linear maps, dropout, activation functions.

Linear maps of few rows (a token of a sequence that is being generated) and other products with few vectors are computed
by bands: one batched product of bands of the matrix's rows. Such a product reads each number of the matrix once and is
memory-bound. As one product, it leaves one of two cores idle and half of the other's bandwidth unused; bands use both.

Letters: ``N`` rows or vectors, ``I`` and ``O`` features in and out (columns and rows of a matrix), ``k`` bands, which
divide O; ``B`` sequences, ``n`` tokens, ``F`` features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smlp.ops import onednn
from smlp.ops.fast_paths import BANDS, allowed, draws_own_masks, first_order_only, takes_bands, takes_onednn

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swish": F.silu,
}

_BACKWARD: dict[str, Callable[..., Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward.grad_input,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    "relu": lambda grad, x, grad_input: torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad_input),
    "swish": torch.ops.aten.silu_backward.grad_input,
}
#: dropout on a CPU: torch draws one number of 53 random bits for each element, and one after the other unless the CPU
#: is Intel's; here each element gets 16 of a generator's 64 bits
_LEVELS = 2**16


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``W x + b`` over the last axis of x, (..., I) to (..., O), as :func:`torch.nn.functional.linear`."""
    if takes_bands(x, weight_OI, bias_O):
        return few_rows(x, weight_OI, bias_O)
    if takes_onednn(x.numel() * weight_OI.size(0), x, weight_OI, *(() if bias_O is None else (bias_O,))):
        return _OneDnnLinear.apply(x.reshape(-1, x.size(-1)), weight_OI, bias_O).view(*x.shape[:-1], -1)
    return F.linear(x, weight_OI, bias_O)


def token_linear(x_BSC: Tensor, weight_OS: Tensor, bias_O: Tensor) -> Tensor:
    """Return ``W x + b`` over the tokens of each sequence, (B, S, C) to (B, O, C): :func:`linear` of the transpose.

    Nothing is transposed: the matrix is multiplied with each sequence as it lies in memory.
    """
    num_multiplications = x_BSC.numel() * weight_OS.size(0)
    if not allowed(x_BSC, weight_OS, bias_O) or takes_onednn(num_multiplications, x_BSC, weight_OS, bias_O):
        return linear(x_BSC.transpose(1, 2), weight_OS, bias_O).transpose(1, 2)
    return torch.baddbmm(bias_O.unsqueeze(1), weight_OS.expand(x_BSC.size(0), -1, -1), x_BSC)


def few_rows(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute :func:`linear` where :func:`smlp.ops.fast_paths.takes_bands` says so."""
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
    @first_order_only
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            onednn.product(grad_NO, weight_OI) if wants_x else None,
            onednn.outer(grad_NO, x_NI).contiguous() if wants_weight else None,
            grad_NO.sum(dim=0) if wants_bias else None,
        )


def rows_by_bands(matrix_OI: Tensor, x_NI: Tensor, bands: int, bias_O: Tensor | None = None) -> Tensor:
    """Return ``W x + b`` for each vector, (O, N): every band gives its rows of the result."""
    matrix_kOI = matrix_OI.unflatten(0, (bands, -1))
    # vectors as columns that lie one after the other: otherwise it is no faster than the whole product
    x_kIN = x_NI.unsqueeze(0).expand(bands, -1, -1).transpose(1, 2)
    if bias_O is None:
        out_kON = torch.bmm(matrix_kOI, x_kIN)
    else:
        out_kON = torch.baddbmm(bias_O.view(bands, -1, 1), matrix_kOI, x_kIN)
    return out_kON.flatten(0, 1)


def columns_by_bands(matrix_OI: Tensor, y_O: Tensor, bands: int) -> Tensor:
    """Return ``W^T y``, (1, I): every band gives its share of each sum."""
    return torch.bmm(y_O.view(bands, 1, -1), matrix_OI.unflatten(0, (bands, -1))).sum(dim=0)


def dropout(x: Tensor, probability: float) -> Tensor:
    """Set elements to zero with a probability; scale the others so that the mean stays (Srivastava et al., 2014).

    Args:
        x: any shape.
        probability: in [0, 1). On a CPU the nearest multiple of 1/65536, which the scale then follows.

    Returns:
        A tensor like ``x``. Numbers come from torch's global generator of the device.
    """
    if probability == 0 or x.numel() == 0:
        return x
    if not draws_own_masks(x):
        return F.dropout(x, probability)
    kept_of = max(round((1 - probability) * _LEVELS), 1)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.long, device=x.device).random_(-(2**63), None)
    bits = words.view(torch.int16)[: x.numel()].view(x.shape)
    return x * (bits <= kept_of - 1 - _LEVELS // 2).to(x.dtype).mul_(_LEVELS / kept_of)


def activation_gradient(name: str, grad: Tensor, x: Tensor, out: Tensor) -> None:
    """Write the gradient of an activation's input to ``out``, which may be ``grad`` itself.

    Args:
        name: a key of ``ACTIVATION_FUNCTIONS``.
        grad: gradient of the output.
        x: the input; all three of one shape.
        out: overwritten.
    """
    _BACKWARD[name](grad, x, grad_input=out)


class _ActivatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BnF: Tensor, name: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_BnF)
        ctx.name = name
        activation = ACTIVATION_FUNCTIONS[name]
        first, second = (activation(half).contiguous() for half in x_BnF.chunk(2, dim=-1))
        return first, second

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_first: Tensor, grad_second: Tensor) -> tuple[Tensor, None]:
        (x_BnF,) = ctx.saved_tensors
        grad_x_BnF = torch.empty_like(x_BnF)
        halves = zip((grad_first, grad_second), x_BnF.chunk(2, dim=-1), grad_x_BnF.chunk(2, dim=-1), strict=True)
        for grad, half, out in halves:
            activation_gradient(ctx.name, grad, half, out)
        return grad_x_BnF, None


def activated_halves(x_BnF: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return ``act(x)``, split in two along the features: each half is contiguous, with no copy forward or backward.

    Args:
        x_BnF: (B, n, F), F even.
        name: a key of ``ACTIVATION_FUNCTIONS``.

    Returns:
        Two tensors (B, n, F/2).

    Raises:
        ValueError: F is odd, or there is no such activation.
    """
    if x_BnF.size(-1) % 2 or name not in ACTIVATION_FUNCTIONS:
        raise ValueError(f"F must be even, and the activation one of {', '.join(ACTIVATION_FUNCTIONS)}, got {name!r}")
    if not allowed(x_BnF):
        first, second = ACTIVATION_FUNCTIONS[name](x_BnF).chunk(2, dim=-1)
        return first, second
    return _ActivatedHalves.apply(x_BnF, name)
