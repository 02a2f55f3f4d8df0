"""Convolutions of tensors without content, so that fvcore can count them in what it traces.

torch traces ``aten::_convolution``; for tensors without content it takes another way there, past what it traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from smlp.errors import UserError


class TracedConvolutions(TorchFunctionMode):
    """``conv1d``, also that of ``nn.Conv1d``, becomes the operator that is traced."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (_conv1d if func is torch.conv1d else func)(*args, **(kwargs or {}))


def _conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Takes what ``torch.conv1d`` does."""
    if isinstance(padding, str):
        raise UserError(f"conv1d with padding={padding!r} is not counted: give the number of positions")
    stride, padding, dilation = ([value] if isinstance(value, int) else value for value in (stride, padding, dilation))
    settings = (False, False, False, False)  # of cuDNN, for tensors on GPUs
    return torch._convolution(input, weight, bias, stride, padding, dilation, False, [0], groups, *settings)
