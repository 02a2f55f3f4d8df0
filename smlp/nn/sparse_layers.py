"""Sparse layers as a configuration asks for them."""

from __future__ import annotations

from torch import nn

from smlp.config import ModelConfig
from smlp.moe.dispatch import FeatureDispatcher, LocalDispatcher, LocalFeatureDispatcher, TokenDispatcher
from smlp.moe.exchange import FeatureExchange, TokenExchange
from smlp.moe.experts import FeedForwardExperts, SpatialExperts
from smlp.moe.feature_layer import FeatureMoE, RoutedFeatureMoE
from smlp.moe.gated_experts import GatedMLPExperts
from smlp.moe.layer import TokenMoE
from smlp.moe.routers import FeatureRouter
from smlp.moe.shuffle import TokenShuffle
from smlp.parallel import Ranks, one_process


def weight_bound(config: ModelConfig) -> float:
    """Spatial weights start as U(-bound, bound)."""
    return config.spatial_init_scale / config.max_tokens


def norm_before_experts(config: ModelConfig) -> nn.Module:
    """The layer norm that all experts of tokens share, or nothing where each has its own."""
    return nn.Identity() if config.router_kind.experts_as_in_base else nn.LayerNorm(config.embed_dim)


def token_dispatcher(ranks: Ranks, name: str) -> TokenDispatcher:
    """What moves the tokens of a layer: nothing leaves the rank where it holds all experts."""
    if ranks.experts.size == 1:
        return LocalDispatcher()
    return TokenExchange(ranks.experts, ranks.layout, name)


def feature_dispatcher(ranks: Ranks, name: str) -> FeatureDispatcher:
    """The same for chunks of the features."""
    if ranks.experts.size == 1:
        return LocalFeatureDispatcher()
    return FeatureExchange(ranks.experts, ranks.layout, name)


def feed_forward_moe(config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> TokenMoE:
    """Feed-forward experts over tokens, those of this rank; of all in one process by default."""
    ranks, name = ranks or one_process(config.moe.num_experts), f"layer {layer_index} (tMoE)"
    experts = FeedForwardExperts(
        config.embed_dim,
        config.ffn_dim,
        ranks.layout.expert_ids,
        config.activation,
        as_in_base=config.router_kind.experts_as_in_base,
    )
    shuffle = None
    if config.router_kind.mixes_ranks(config) and ranks.experts.size > 1:
        shuffle = TokenShuffle(ranks.experts, ranks.layout, name)
    return TokenMoE(config.router_kind.build(config), experts, name, token_dispatcher(ranks, name), shuffle)


def gated_mlp_moe(config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> TokenMoE:
    """gMLP layers as experts over tokens (smlp.txt, appendix A)."""
    ranks, name = ranks or one_process(config.moe.num_experts), f"layer {layer_index} (gMLP-MoE)"
    experts = GatedMLPExperts(
        config.embed_dim,
        config.ffn_dim,
        config.max_tokens,
        ranks.layout.expert_ids,
        config.activation,
        weight_bound(config),
        config.experts_per_token,
    )
    return TokenMoE(config.router_kind.build(config), experts, name, token_dispatcher(ranks, name))


def feature_moe(config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> FeatureMoE:
    """The sMoE (smlp.txt, section 3.2)."""
    moe, prefix = config.moe, config.prefix_tokens
    width, num_experts = config.embed_dim, moe.num_experts
    ranks, name = ranks or one_process(num_experts), f"layer {layer_index} (sMoE)"
    experts = SpatialExperts(
        config.max_tokens - prefix, ranks.layout.expert_ids, weight_bound(config), moe.spatial_bias_init
    )
    dispatcher = feature_dispatcher(ranks, name)
    gated = moe.feature_experts == "gated"
    if moe.feature_routing == "deterministic":
        return FeatureMoE(width, num_experts, experts, dispatcher, name, gated)
    router = FeatureRouter(prefix if moe.feature_routing == "partial" else config.max_tokens, num_experts)
    return RoutedFeatureMoE(width, num_experts, experts, router, prefix, name, dispatcher, gated)
