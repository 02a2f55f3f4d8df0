"""sMLP's sparse block: the sMoE, then the tMoE (smlp.txt, section 3), and what the sMoE costs.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``H`` features, ``E`` experts, ``P`` prefix.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.settings import require
from smlp.costs.component import LAYER_NORM_FLOPS, LAYER_NORM_KEEPS, NORMS, ROUTER, SPATIAL, Component
from smlp.moe.dispatch import LocalFeatureDispatcher
from smlp.moe.exchange import FeatureExchange
from smlp.moe.experts import SpatialExperts
from smlp.moe.feature_layer import FeatureMoE, RoutedFeatureMoE
from smlp.moe.routers import FeatureRouter
from smlp.nn.blocks.base import register_sparse_block
from smlp.nn.blocks.sparse import SparseBlockKind
from smlp.nn.layers import Dropout, spatial_parameters
from smlp.nn.state import ForwardContext
from smlp.parallel import Ranks, one_process

FEATURE_MOE = "sMoE"


class FeatureSublayer(nn.Module):
    """``x + sMoE(x)`` (smlp.txt, section 3.2)."""

    def __init__(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.feature_moe = feature_moe(config, layer_index, ranks)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        return x_BnH + self.dropout(context.by_sequences(self.feature_moe, x_BnH))


def feature_moe(config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> FeatureMoE:
    """Build the sMoE, with the experts of this rank; with all of them by default."""
    prefix, width, num_experts = config.prefix_tokens, config.embed_dim, config.num_experts
    ranks, name = ranks or one_process(num_experts), f"layer {layer_index} (sMoE)"
    experts = SpatialExperts(
        config.max_tokens - prefix,
        ranks.layout.expert_ids,
        config.spatial_weight_bound,
        config.spatial_bias_init,
        config.spatial_weights == "toeplitz",
    )
    is_spread = ranks.experts.size > 1
    dispatcher = FeatureExchange(ranks.experts, ranks.layout, name) if is_spread else LocalFeatureDispatcher()
    if config.feature_routing == "deterministic":
        return FeatureMoE(width, num_experts, experts, dispatcher, name, config.feature_experts)
    router = FeatureRouter(prefix if config.feature_routing == "partial" else config.max_tokens, num_experts)
    return RoutedFeatureMoE(width, num_experts, experts, router, prefix, name, dispatcher, config.feature_experts)


@register_sparse_block("smlp")
class SparseMLP(SparseBlockKind):
    """The sMoE, then the tMoE (smlp.txt, section 3.1)."""

    has_feature_moe = has_spatial_weights = True

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

    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        return FeatureSublayer(config, layer_index, ranks)

    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        """Two norms, the router's scores once for each sequence, and experts over the positions after the prefix."""
        H, E, P, n = config.embed_dim, config.num_experts, config.prefix_tokens, num_tokens
        width = config.max_tokens - P
        read = {"deterministic": 0, "partial": P, "leaky": config.max_tokens}[config.feature_routing]
        # a sequence no longer than the prefix passes through unrouted
        routing = H * min(n, read) * E / n if n > P else 0
        yield Component(
            f"blocks.{layer_index}.mixing",
            layer_index,
            FEATURE_MOE,
            expert_params=spatial_parameters(width, True, config.spatial_weights == "toeplitz") + width,
            num_experts=E,
            other_params=4 * H + read * E,
            work={NORMS: 2 * LAYER_NORM_FLOPS * H, SPATIAL: max(n - P, 0) ** 2 * H / n, ROUTER: routing},
            num_mixed=max(n - P, 0),
        )

    def mixing_activations(self, config: ModelConfig) -> float:
        width, share = config.embed_dim, 1 - config.prefix_tokens / config.max_tokens
        norms = 2 * LAYER_NORM_KEEPS
        gates = width if config.feature_experts == "gated" else 0  # the gates that multiply the features
        # inputs of the norms, and the second norm's output in the experts' order
        if config.feature_routing == "deterministic":
            return 3 * width + norms + gates
        # inputs of the norms, input of the router; after the prefix, sorted features and the values that routing
        # probabilities multiply
        return 2 * width + norms + (1 - share) * width + share * (2 * width + gates)
