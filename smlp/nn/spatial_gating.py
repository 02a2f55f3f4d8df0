"""The spatial gating unit of gMLP, causal and with heads.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``F`` features, ``h`` heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from smlp.moe.experts import SpatialExperts
from smlp.nn.state import ForwardContext


class SpatialGatingUnit(nn.Module):
    """``z1 * (tril(W) @ LN(z2) + b)`` with ``z1, z2`` the halves of the features (gmlp.txt, equation 4).

    ``W`` starts near zero and ``b`` at one, so that the unit starts as ``z1``. With h heads, ``z2`` is cut into h
    chunks of features with a ``W`` and a ``b`` each (smlp.txt, section 4.2).

    Args:
        ffn_dim: F.
        max_tokens: T.
        num_heads: h; divides F/2.
        weight_bound: initial weights are U(-bound, bound).
    """

    def __init__(self, ffn_dim: int, max_tokens: int, num_heads: int, weight_bound: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(ffn_dim // 2)
        self.heads = SpatialExperts(max_tokens, range(num_heads), weight_bound, bias_init=1.0)

    def forward(self, z1_Bnf: Tensor, z2_Bnf: Tensor, context: ForwardContext) -> Tensor:
        """Two halves of the features, (B, n, F/2) each, to (B, n, F/2)."""
        seen, start = context.remember(self, self.norm(z2_Bnf), self.heads.max_tokens)
        z1_Bnhc, seen_Bmhc = (z.unflatten(2, (self.num_heads, -1)) for z in (z1_Bnf, seen))
        # by head: flattened before the product, what comes of the projection need not lie in this order
        return self.heads(seen_Bmhc, start, gate_Bmec=z1_Bnhc).flatten(2)
