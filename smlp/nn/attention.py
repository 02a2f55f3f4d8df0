"""Causal self-attention (Vaswani et al., 2017), through torch's scaled-dot-product attention.

Letters: ``B`` sequences, ``n`` new tokens, ``m`` all tokens up to now, ``H`` width, ``h`` heads, ``d`` = H/h.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smlp.nn.linear import xavier_linear
from smlp.nn.state import ForwardContext


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which no position sees a later one.

    Padding stands on the right, so that no real token can see it.

    Args:
        embed_dim: H.
        num_heads: h, divides H.
        max_tokens: T, how many keys and values incremental decoding keeps.
    """

    def __init__(self, embed_dim: int, num_heads: int, max_tokens: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.max_tokens = max_tokens
        self.proj_in = xavier_linear(embed_dim, 3 * embed_dim)
        self.proj_out = xavier_linear(embed_dim, embed_dim)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        """(B, n, H) to (B, n, H)."""
        return self.proj_out(context.by_sequences(self._mix, self.proj_in(x_BnH)))

    def _mix(self, x_Bn3H: Tensor, context: ForwardContext) -> Tensor:
        """Queries, keys and values to what each position sees, (B, n, H)."""
        width = x_Bn3H.size(2) // (3 * self.num_heads)
        # (B, 3h, n, d): each head's keys lie together where they are kept, which makes a single query twice as fast
        heads = x_Bn3H.unflatten(2, (-1, width)).transpose(1, 2)
        query, key_value = heads.split([self.num_heads, 2 * self.num_heads], dim=1)
        key_value, start = context.remember(self, key_value, self.max_tokens)
        key, value = key_value.chunk(2, dim=1)
        if start == 0:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=_visible(query.size(2), start, query))
        return mixed.transpose(1, 2).flatten(2)


def _visible(num_new: int, start: int, like: Tensor) -> Tensor | None:
    """Which tokens each new one sees, (n, m), or None for all of them, which a single new one does."""
    if num_new == 1:
        return None
    return torch.ones(num_new, start + num_new, dtype=torch.bool, device=like.device).tril(diagonal=start)
