"""The dense feed-forward network of a Transformer."""

from __future__ import annotations

from torch import Tensor, nn

from smlp.nn.linear import xavier_linear
from smlp.ops import ACTIVATION_FUNCTIONS


class FeedForward(nn.Module):
    """``fc2(act(fc1(x)))``, H to F to H.

    Args:
        embed_dim, ffn_dim: H, F.
        activation: "gelu", "relu" or "swish".
    """

    def __init__(self, embed_dim: int, ffn_dim: int, activation: str) -> None:
        super().__init__()
        self.fc1 = xavier_linear(embed_dim, ffn_dim)
        self.activation = ACTIVATION_FUNCTIONS[activation]
        self.fc2 = xavier_linear(ffn_dim, embed_dim)

    def forward(self, x_BnH: Tensor) -> Tensor:
        """(B, n, H) to (B, n, H)."""
        return self.fc2(self.activation(self.fc1(x_BnH)))
