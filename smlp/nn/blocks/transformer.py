"""Transformer blocks, dense and with experts: self-attention (Vaswani et al., 2017), and what it costs.

Letters: ``B`` sequences, ``n`` tokens, ``H`` width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.settings import require, setting
from smlp.costs.component import (
    ATTENTION,
    LAYER_NORM_FLOPS,
    LAYER_NORM_KEEPS,
    NORMS,
    PROJECTIONS,
    SCORES,
    Component,
    dropout_keeps,
    linear_parameters,
)
from smlp.nn.attention import BUCKETS, SelfAttention
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
from smlp.nn.layers import Dropout
from smlp.nn.state import ForwardContext
from smlp.parallel import Ranks

SCORES_OF = ("content", "rotary", "relative", "relative_only")


@dataclass(frozen=True)
class TransformerSettings:
    """Settings of self-attention (Liu et al., 2021, Table 3), and of the mask of dense blocks' feed-forward layers."""

    attention: str = setting(
        "content",
        "scores of self-attention: queries times keys, the same turned by their positions, plus a bias for each "
        "distance, or the bias alone",
        SCORES_OF,
    )
    ffn_density: float = setting(
        1.0, "share of the feed-forward weights of dense blocks that a static random mask keeps; 1 for no mask"
    )

    def __post_init__(self) -> None:
        require(
            0 < self.ffn_density <= 1, f"transformer_ffn_density must be above 0 and at most 1, got {self.ffn_density}"
        )


class AttentionSublayer(nn.Module):
    """``x + attention(LN(x))``, or, with ``layer_norm=after``, ``LN(x + attention(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.attention = SelfAttention(config, scores=config.own("transformer").attention)
        self.dropout = Dropout(config.dropout)
        self.norms_after = config.layer_norm == "after"

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        if self.norms_after:
            return self.norm(x_BnH + self.dropout(self.attention(x_BnH, context)))
        return x_BnH + self.dropout(self.attention(self.norm(x_BnH), context))


def _check_heads(config: ModelConfig) -> None:
    require(
        config.embed_dim % config.num_heads == 0,
        f"num_heads={config.num_heads} must divide embed_dim={config.embed_dim}",
    )
    width = config.embed_dim // config.num_heads
    require(
        config.own("transformer").attention != "rotary" or width % 2 == 0,
        f"rotary attention needs heads of an even width, got {width} (embed_dim={config.embed_dim} / num_heads="
        f"{config.num_heads})",
    )


def _attention_costs(config: ModelConfig, layer: int, num_tokens: int) -> Component:
    """Return the costs of projections, and of n scores and n values of width H for each query."""
    H, scores = config.embed_dim, config.own("transformer").attention
    content = scores != "relative_only"
    projections = linear_parameters(H, 3 * H if content else H) + linear_parameters(H, H)
    return Component(
        f"blocks.{layer}.mixing",
        layer,
        ATTENTION,
        other_params=2 * H + projections + scores.startswith("relative") * config.num_heads * BUCKETS,
        work={
            NORMS: LAYER_NORM_FLOPS * H,
            PROJECTIONS: (4 if content else 2) * H * H,
            SCORES: (2 if content else 1) * num_tokens * H,
        },
        num_mixed=num_tokens,
    )


def _attention_keeps(config: ModelConfig) -> float:
    # input and output of the norm, queries, keys, values, the heads' outputs, the sum of each softmax
    kept = 6 * config.embed_dim + LAYER_NORM_KEEPS + config.num_heads
    scores = config.own("transformer").attention
    if scores.startswith("relative"):  # with a bias, torch keeps the weights of all pairs; alone, it has no queries
        kept += config.num_heads * config.max_tokens - (2 * config.embed_dim if scores == "relative_only" else 0)
    return kept


@register_dense_block("transformer")
class Transformer(BlockKind):
    """Self-attention and a feed-forward network."""

    settings = TransformerSettings
    can_norm_after = True

    def check(self, config: ModelConfig) -> None:
        _check_heads(config)

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        return DenseBlock(config, AttentionSublayer(config), config.own("transformer").ffn_density)

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        return _attention_costs(config, layer_index, num_tokens), feed_forward_costs(config, layer_index)

    def activations_per_position(self, config: ModelConfig) -> float:
        return _attention_keeps(config) + feed_forward_keeps(config) + 2 * dropout_keeps(config)


@register_sparse_block("transformer")
class SparseTransformer(SparseBlockKind):
    """Self-attention, then the tMoE."""

    settings = TransformerSettings

    def check(self, config: ModelConfig) -> None:
        _check_heads(config)
        density = config.own("transformer").ffn_density
        require(
            density == 1 or (config.dense_block == "transformer" and config.num_dense_layers > 0),
            f"transformer_ffn_density={density} masks dense blocks with self-attention, and this model has none",
        )

    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        return AttentionSublayer(config)

    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        yield _attention_costs(config, layer_index, num_tokens)

    def mixing_activations(self, config: ModelConfig) -> float:
        return _attention_keeps(config)
