"""Linear layers with the initial values and the product that all blocks share."""

from __future__ import annotations

from torch import Tensor, nn

from smlp.ops import linear


class Linear(nn.Linear):
    """torch's layer, fast for the few rows of a text that is being written."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) to (..., O)."""
        return linear(x, self.weight, self.bias)


def xavier_linear(in_features: int, out_features: int) -> Linear:
    """A linear layer with Xavier's uniform weights and zero bias."""
    layer = Linear(in_features, out_features)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
