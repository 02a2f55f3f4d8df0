"""Transformer blocks, dense and with experts: causal self-attention (Vaswani et al., 2017), and what it costs.

Letters: ``B`` sequences, ``n`` new tokens, ``m`` all tokens up to now, ``H`` width, ``h`` heads, ``d`` = H/h.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.settings import require
from smlp.costs.component import (
    LAYER_NORM_FLOPS,
    LAYER_NORM_KEEPS,
    NORMS,
    PROJECTIONS,
    SCORES,
    Component,
    dropout_keeps,
    linear_parameters,
)
from smlp.nn.blocks.base import (
    Block,
    BlockKind,
    DenseBlock,
    feed_forward_costs,
    feed_forward_keeps,
    register_dense_block,
    register_sparse_block,
)
from smlp.nn.blocks.sparse import SparseBlockKind
from smlp.nn.layers import Dropout, xavier_linear
from smlp.nn.state import ForwardContext
from smlp.parallel import Ranks

ATTENTION = "self-attention"


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
        """Map queries, keys and values, (B, n, 3H), to what each position sees, (B, n, H)."""
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
    """Return which tokens each new one sees, (n, m), or None for all of them, which a single new one does."""
    if num_new == 1:
        return None
    return torch.ones(num_new, start + num_new, dtype=torch.bool, device=like.device).tril(diagonal=start)


class AttentionSublayer(nn.Module):
    """``x + attention(LN(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.attention = CausalSelfAttention(config.embed_dim, config.num_heads, config.max_tokens)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        return x_BnH + self.dropout(self.attention(self.norm(x_BnH), context))


def _check_heads(config: ModelConfig) -> None:
    require(
        config.embed_dim % config.num_heads == 0,
        f"num_heads={config.num_heads} must divide embed_dim={config.embed_dim}",
    )


def _attention_costs(config: ModelConfig, layer: int, num_tokens: int) -> Component:
    """Return the costs of projections, and of n scores and n values of width H for each query."""
    H = config.embed_dim
    return Component(
        f"blocks.{layer}.mixing",
        layer,
        ATTENTION,
        other_params=2 * H + linear_parameters(H, 3 * H) + linear_parameters(H, H),
        work={NORMS: LAYER_NORM_FLOPS * H, PROJECTIONS: 4 * H * H, SCORES: 2 * num_tokens * H},
        num_mixed=num_tokens,
    )


def _attention_keeps(config: ModelConfig) -> float:
    # the norm's input and output, queries, keys and values, what they give, the sum of each softmax
    return 6 * config.embed_dim + LAYER_NORM_KEEPS + config.num_heads


@register_dense_block("transformer")
class Transformer(BlockKind):
    """Self-attention and a feed-forward network."""

    def check(self, config: ModelConfig) -> None:
        _check_heads(config)

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        return DenseBlock(config, AttentionSublayer(config))

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        return _attention_costs(config, layer_index, num_tokens), feed_forward_costs(config, layer_index)

    def activations_per_position(self, config: ModelConfig) -> float:
        return _attention_keeps(config) + feed_forward_keeps(config) + 2 * dropout_keeps(config)


@register_sparse_block("transformer")
class SparseTransformer(SparseBlockKind):
    """Self-attention, then the tMoE."""

    def check(self, config: ModelConfig) -> None:
        _check_heads(config)

    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        return AttentionSublayer(config)

    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        yield _attention_costs(config, layer_index, num_tokens)

    def mixing_activations(self, config: ModelConfig) -> float:
        return _attention_keeps(config)
