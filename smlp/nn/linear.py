"""Linear layers with the initial values that all blocks share."""

from __future__ import annotations

from torch import nn


def xavier_linear(in_features: int, out_features: int) -> nn.Linear:
    """A linear layer with Xavier's uniform weights and zero bias."""
    linear = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
