"""sMLP's sparse block: the sMoE, then the tMoE (Yu et al., 2022, section 3), and what the sMoE costs.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``H`` features, ``E`` experts, ``P`` prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.model import MOST_INIT
from smlp.config.settings import require, setting
from smlp.costs.component import LAYER_NORM_FLOPS, LAYER_NORM_KEEPS, NORMS, PROJECTIONS, ROUTER, SPATIAL, Component
from smlp.moe.dispatch import LocalFeatureDispatcher
from smlp.moe.exchange import FeatureExchange
from smlp.moe.experts import SpatialExperts
from smlp.moe.feature_layer import FeatureMoE, RoutedFeatureMoE
from smlp.moe.routers import FeatureRouter
from smlp.nn.blocks.base import register_sparse_block
from smlp.nn.blocks.sparse import SparseBlockKind
from smlp.nn.layers import Dropout, Linear, spatial_parameters, xavier_linear
from smlp.nn.state import ForwardContext
from smlp.parallel import Ranks, one_process

FEATURE_MOE = "sMoE"


ORDERS = ("features_first", "tokens_first")
MATRICES = ("as_model", "full", "toeplitz")


@dataclass(frozen=True)
class SparseMLPSettings:
    """Settings of what the sMoE adds to the residual stream, and of its matrices. The defaults are the paper's."""

    feature_scale: float = setting(
        0.0, "initial value of a learnt factor for each feature of the sMoE's output, as LayerScale's; 0 for none"
    )
    projection_dim: int = setting(
        0, "width r of a projection of the sMoE's output, H to r to H; H for a single matrix, 0 for none"
    )
    order: str = setting("features_first", "whether the sMoE precedes the tMoE in a block or follows it", ORDERS)
    spatial_weights: str = setting("as_model", "matrices of the sMoE: as --spatial-weights, or another kind", MATRICES)

    def __post_init__(self) -> None:
        require(
            0 <= self.feature_scale < MOST_INIT,
            f"smlp_feature_scale must be from 0 to below {MOST_INIT:g}, got {self.feature_scale}",
        )
        require(self.projection_dim >= 0, f"smlp_projection_dim must not be negative, got {self.projection_dim}")


class FeatureSublayer(nn.Module):
    """``x + sMoE(x)`` (Yu et al., 2022, section 3.2), or ``x + scale * V(U(sMoE(x)))`` with a scale and a projection.

    The scale is one number for each feature (LayerScale: Touvron et al., 2021, as in ResMLP). The projection has no
    bias, so that it adds nothing where the sMoE does not.
    """

    def __init__(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> None:
        super().__init__()
        own, width = config.own("smlp"), config.embed_dim
        self.feature_moe = feature_moe(config, layer_index, ranks)
        self.projection = nn.ModuleList(_projection(width, own.projection_dim))
        self.scale = nn.Parameter(torch.full((width,), float(own.feature_scale))) if own.feature_scale else None
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        update_BnH = context.by_sequences(self.feature_moe, x_BnH)
        for layer in self.projection:
            update_BnH = layer(update_BnH)
        if self.scale is not None:
            update_BnH = update_BnH * self.scale
        return x_BnH + self.dropout(update_BnH)


def _projection(width: int, inner: int) -> list[Linear]:
    """Return the layers of a projection H to r to H: none, one H x H, or two."""
    widths = [] if not inner else [width, width] if inner == width else [width, inner, width]
    return [xavier_linear(i, o, bias=False) for i, o in itertools.pairwise(widths)]


def _projection_size(config: ModelConfig) -> int:
    """Return the number of parameters of the projection, which is that of its multiply-adds for each position."""
    H, r = config.embed_dim, config.own("smlp").projection_dim
    return H * H if r == H else 2 * H * r


def _is_toeplitz(config: ModelConfig) -> bool:
    own = config.own("smlp").spatial_weights
    return (config.spatial_weights if own == "as_model" else own) == "toeplitz"


def feature_moe(config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> FeatureMoE:
    """Build the sMoE, with the experts of this rank; with all of them by default."""
    prefix, width, num_experts = config.prefix_tokens, config.embed_dim, config.num_experts
    ranks, name = ranks or one_process(num_experts), f"layer {layer_index} (sMoE)"
    experts = SpatialExperts(
        config.max_tokens - prefix,
        ranks.layout.expert_ids,
        config.spatial_weight_bound,
        config.spatial_bias_init,
        _is_toeplitz(config),
        config.spatial_init_average,
        num_experts,
    )
    is_spread = ranks.experts.size > 1
    dispatcher = FeatureExchange(ranks.experts, ranks.layout, name) if is_spread else LocalFeatureDispatcher()
    if config.feature_routing == "deterministic":
        return FeatureMoE(width, num_experts, experts, dispatcher, name, config.feature_experts)
    router = FeatureRouter(prefix if config.feature_routing == "partial" else config.max_tokens, num_experts)
    return RoutedFeatureMoE(width, num_experts, experts, router, prefix, name, dispatcher, config.feature_experts)


@register_sparse_block("smlp")
class SparseMLP(SparseBlockKind):
    """The sMoE, then the tMoE (Yu et al., 2022, section 3.1)."""

    settings = SparseMLPSettings
    has_feature_moe = has_spatial_weights = True

    def attends(self, config: ModelConfig) -> bool:
        return False

    def check(self, config: ModelConfig) -> None:
        require(
            config.embed_dim % config.num_experts == 0,
            f"num_experts={config.num_experts} must divide embed_dim={config.embed_dim}: "
            "the sMoE gives each expert an equal share of the features",
        )
        require(
            config.prefix_tokens < config.max_tokens,
            f"prefix_fraction={config.prefix_fraction} of max_tokens={config.max_tokens} leaves nothing to predict",
        )
        inner = config.own("smlp").projection_dim
        require(
            inner <= config.embed_dim,
            f"smlp_projection_dim={inner} is wider than embed_dim={config.embed_dim}, where a single matrix is enough",
        )

    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        return FeatureSublayer(config, layer_index, ranks)

    def has_tokens_first(self, config: ModelConfig) -> bool:
        return config.own("smlp").order == "tokens_first"

    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        """Yield the costs of two norms, the router's scores once for each sequence, experts over the positions after
        the prefix, projection and scale."""
        H, E, P, n = config.embed_dim, config.num_experts, config.prefix_tokens, num_tokens
        width = config.max_tokens - P
        read = {"deterministic": 0, "partial": P, "leaky": config.max_tokens}[config.feature_routing]
        # a sequence no longer than the prefix passes through unrouted
        routing = H * min(n, read) * E / n if n > P else 0
        projection = _projection_size(config)
        scale = H if config.own("smlp").feature_scale else 0
        work = {NORMS: 2 * LAYER_NORM_FLOPS * H, SPATIAL: max(n - P, 0) ** 2 * H / n, ROUTER: routing}
        yield Component(
            f"blocks.{layer_index}.mixing",
            layer_index,
            FEATURE_MOE,
            expert_params=spatial_parameters(width, True, _is_toeplitz(config)) + width,
            num_experts=E,
            other_params=4 * H + read * E + projection + scale,
            work={**work, PROJECTIONS: projection} if projection else work,
            num_mixed=max(n - P, 0),
        )

    def mixing_activations(self, config: ModelConfig) -> float:
        width, share = config.embed_dim, 1 - config.prefix_tokens / config.max_tokens
        own = config.own("smlp")
        inner = own.projection_dim if own.projection_dim != width else 0
        # inputs of the projection's matrices, and the numbers that the scale multiplies
        added = (width + inner if own.projection_dim else 0) + (width if own.feature_scale else 0)
        norms = 2 * LAYER_NORM_KEEPS + added
        gates = width if config.feature_experts == "gated" else 0  # the gates that multiply the features
        # inputs of the norms, and the second norm's output in the experts' order
        if config.feature_routing == "deterministic":
            return 3 * width + norms + gates
        # inputs of the norms, input of the router; after the prefix, sorted features and the values that routing
        # probabilities multiply
        return 2 * width + norms + (1 - share) * width + share * (2 * width + gates)
