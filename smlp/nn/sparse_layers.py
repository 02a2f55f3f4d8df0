"""Sparse layers as a configuration asks for them."""

from __future__ import annotations

from dataclasses import fields

from smlp.config import ModelConfig
from smlp.moe.experts import FeedForwardExperts, SpatialExperts
from smlp.moe.feature_layer import FeatureMoE, RoutedFeatureMoE
from smlp.moe.gated_experts import GatedMLPExperts
from smlp.moe.layer import TokenMoE
from smlp.moe.routers import BalancedRouter, FeatureRouter, HashRouter, Router, TopKRouter, TopKSettings


def weight_bound(config: ModelConfig) -> float:
    """Spatial weights start as U(-bound, bound)."""
    return config.spatial_init_scale / config.max_tokens


def token_router(config: ModelConfig) -> Router:
    """The router of tokens."""
    moe, width = config.moe, config.embed_dim
    if moe.router == "base":
        return BalancedRouter(width, moe.num_experts, moe.centroid_init_gain, moe.base_shuffle)
    if moe.router == "hash":
        return HashRouter(config.vocab_size, moe.num_experts, moe.hash_seed if moe.hash_kind == "random" else None)
    same_name = {field.name: getattr(moe, field.name) for field in fields(TopKSettings) if field.name != "num_choices"}
    return TopKRouter(width, moe.num_experts, TopKSettings(num_choices=moe.experts_per_token, **same_name))


def feed_forward_moe(config: ModelConfig, layer_index: int) -> TokenMoE:
    """Feed-forward experts over tokens."""
    moe = config.moe
    experts = FeedForwardExperts(
        config.embed_dim, config.ffn_dim, range(moe.num_experts), config.activation, as_in_base=moe.router == "base"
    )
    return TokenMoE(token_router(config), experts, f"layer {layer_index} (tMoE)")


def gated_mlp_moe(config: ModelConfig, layer_index: int) -> TokenMoE:
    """gMLP layers as experts over tokens (smlp.txt, appendix A)."""
    experts = GatedMLPExperts(
        config.embed_dim,
        config.ffn_dim,
        config.max_tokens,
        range(config.moe.num_experts),
        config.activation,
        weight_bound(config),
        config.moe.experts_per_token,
    )
    return TokenMoE(token_router(config), experts, f"layer {layer_index} (gMLP-MoE)")


def feature_moe(config: ModelConfig, layer_index: int) -> FeatureMoE:
    """The sMoE (smlp.txt, section 3.2)."""
    moe, prefix = config.moe, config.prefix_tokens
    width, num_experts = config.embed_dim, moe.num_experts
    experts = SpatialExperts(
        config.max_tokens - prefix, range(num_experts), weight_bound(config), moe.spatial_bias_init
    )
    if moe.feature_routing == "deterministic":
        return FeatureMoE(width, num_experts, experts)
    router = FeatureRouter(prefix if moe.feature_routing == "partial" else config.max_tokens, num_experts)
    return RoutedFeatureMoE(width, num_experts, experts, router, prefix, f"layer {layer_index} (sMoE)")
