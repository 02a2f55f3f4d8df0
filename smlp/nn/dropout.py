"""Dropout as a module."""

from __future__ import annotations

from torch import Tensor, nn

from smlp.ops import dropout


class Dropout(nn.Module):
    """:func:`smlp.ops.dropout` in training, nothing in evaluation.

    Args:
        probability: of an element to be set to zero.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.probability) if self.training else x

    def extra_repr(self) -> str:
        return f"probability={self.probability}"
