"""The blocks of the paper's comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from smlp.config import ModelConfig
from smlp.config.settings import require
from smlp.costs import memory, parts
from smlp.costs.component import Component
from smlp.kinds.block import BlockKind, SparseBlockKind
from smlp.kinds.registration import register_dense_block, register_sparse_block

if TYPE_CHECKING:
    from torch import nn

    from smlp.nn.blocks import Block
    from smlp.parallel import Ranks


def _check_halves(config: ModelConfig) -> None:
    """Of a spatial gating unit."""
    require(config.ffn_dim % 2 == 0, f"ffn_dim must be even to be split in halves, got {config.ffn_dim}")
    require(
        (config.ffn_dim // 2) % config.num_heads == 0,
        f"num_heads={config.num_heads} must divide half of ffn_dim={config.ffn_dim}",
    )


def _check_heads(config: ModelConfig) -> None:
    """Of self-attention."""
    require(
        config.embed_dim % config.num_heads == 0,
        f"num_heads={config.num_heads} must divide embed_dim={config.embed_dim}",
    )


@register_dense_block("gmlp")
class GatedMLP(BlockKind):
    """gMLP (gmlp.txt, section 2)."""

    has_spatial_weights = True

    def check(self, config: ModelConfig) -> None:
        _check_halves(config)

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        from smlp.nn.blocks import GatedMLPBlock

        return GatedMLPBlock(config)

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        return parts.gated_mlp(config, layer_index, num_tokens)

    def activations_per_position(self, config: ModelConfig) -> float:
        return memory.gated_mlp(config)

    def ffn_multiple(self, config: ModelConfig) -> int:
        return 2 * config.num_heads


@register_dense_block("transformer")
class Transformer(BlockKind):
    """Self-attention and a feed-forward network."""

    def check(self, config: ModelConfig) -> None:
        _check_heads(config)

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        from smlp.nn.blocks import AttentionSublayer, DenseBlock

        return DenseBlock(config, AttentionSublayer(config))

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        return parts.attention(config, layer_index, num_tokens), parts.feed_forward(config, layer_index)

    def activations_per_position(self, config: ModelConfig) -> float:
        return memory.attention(config) + memory.mask(config) + memory.feed_forward(config) + memory.mask(config)


@register_sparse_block("smlp")
class SparseMLP(SparseBlockKind):
    """The sMoE, then the tMoE (smlp.txt, section 3.1)."""

    has_feature_moe = has_spatial_weights = True

    def check(self, config: ModelConfig) -> None:
        require(
            config.embed_dim % config.moe.num_experts == 0,
            f"num_experts={config.moe.num_experts} must divide embed_dim={config.embed_dim}: "
            "the sMoE gives each expert an equal share of the features",
        )
        require(
            config.prefix_tokens < config.max_tokens,
            f"prefix_fraction={config.moe.prefix_fraction} of max_tokens={config.max_tokens} leaves nothing to predict",
        )

    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        from smlp.nn.blocks import FeatureSublayer

        return FeatureSublayer(config, layer_index, ranks)

    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        yield parts.feature_moe(config, layer_index, num_tokens)

    def mixing_activations(self, config: ModelConfig) -> float:
        return memory.feature_moe(config)


@register_sparse_block("transformer")
class SparseTransformer(SparseBlockKind):
    """Self-attention, then the tMoE."""

    def check(self, config: ModelConfig) -> None:
        _check_heads(config)

    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        from smlp.nn.blocks import AttentionSublayer

        return AttentionSublayer(config)

    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        yield parts.attention(config, layer_index, num_tokens)

    def mixing_activations(self, config: ModelConfig) -> float:
        return memory.attention(config)


@register_sparse_block("gmlp_moe")
class GatedMLPMoE(BlockKind):
    """gMLP layers as experts of tokens (smlp.txt, appendix A)."""

    has_spatial_weights = True

    def check(self, config: ModelConfig) -> None:
        _check_halves(config)

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        from torch import nn

        from smlp.nn.blocks import SparseBlock
        from smlp.nn.sparse_layers import gated_mlp_moe

        return SparseBlock(None, gated_mlp_moe(config, layer_index, ranks), nn.Identity(), config.dropout)

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        yield from parts.router(config, layer_index)
        yield parts.gated_mlp_experts(config, layer_index)

    def activations_per_position(self, config: ModelConfig) -> float:
        return memory.gated_mlp_experts(config) + memory.mask(config)

    def ffn_multiple(self, config: ModelConfig) -> int:
        return 2 * config.num_heads
