"""Activation functions, and their gradients written where they are wanted.

Letters: ``B`` sequences, ``n`` tokens, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from smlp.ops.fast_paths import allowed

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}

_BACKWARD: dict[str, Callable[..., Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward.grad_input,
    "relu": lambda grad, x, grad_input: torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad_input),
    "swish": torch.ops.aten.silu_backward.grad_input,
}


def activation_gradient(name: str, grad: Tensor, x: Tensor, out: Tensor) -> None:
    """The gradient of an activation's input into ``out``, which may be ``grad`` itself.

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
    @once_differentiable
    def backward(ctx: Any, grad_first: Tensor, grad_second: Tensor) -> tuple[Tensor, None]:
        (x_BnF,) = ctx.saved_tensors
        grad_x_BnF = torch.empty_like(x_BnF)
        halves = zip((grad_first, grad_second), x_BnF.chunk(2, dim=-1), grad_x_BnF.chunk(2, dim=-1), strict=True)
        for grad, half, out in halves:
            activation_gradient(ctx.name, grad, half, out)
        return grad_x_BnF, None


def activated_halves(x_BnF: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """``act(x)``, cut in two along the features: each half lies by itself, and neither way copies it.

    Args:
        x_BnF: (B, n, F), F even.
        name: a key of ``ACTIVATION_FUNCTIONS``.

    Returns:
        Two tensors (B, n, F/2).
    """
    if not allowed(x_BnF):
        first, second = ACTIVATION_FUNCTIONS[name](x_BnF).chunk(2, dim=-1)
        return first, second
    return _ActivatedHalves.apply(x_BnF, name)
