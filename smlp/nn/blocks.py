"""Residual blocks: the dense one of gMLP and the sparse one of sMLP.

Letters: ``B`` sequences, ``n`` tokens, ``H`` embedding width, ``F`` feed-forward width. Every block maps
``(x_BnH, context)`` to the new ``x_BnH`` and its auxiliary losses.
"""

from __future__ import annotations

from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.context import ForwardContext
from smlp.moe.experts import FeedForwardExperts, SpatialExperts
from smlp.moe.layer import FeatureMoE, TokenMoE
from smlp.moe.routers import BalancedRouter
from smlp.nn.spatial_gating import SpatialGatingUnit
from smlp.ops import ACTIVATION_FUNCTIONS

AuxLosses = dict[str, Tensor]


class GatedMLPBlock(nn.Module):
    """``x + V(s(act(U(LN(x)))))`` with the spatial gating unit s (gmlp.txt, equation 1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.proj_in = _xavier_linear(config.embed_dim, config.ffn_dim)
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.gating = SpatialGatingUnit(config.ffn_dim, config.max_tokens, config.num_heads, weight_bound(config))
        self.proj_out = _xavier_linear(config.ffn_dim // 2, config.embed_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        hidden_BnF = self.activation(self.proj_in(self.norm(x_BnH)))
        return x_BnH + self.dropout(self.proj_out(self.gating(hidden_BnF, context))), {}


class SparseMLPBlock(nn.Module):
    """sMoE over feature chunks, then tMoE over tokens, each with a residual connection (smlp.txt, section 3.1)."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        moe = config.moe
        expert_ids = range(moe.num_experts)
        self.feature_moe = FeatureMoE(
            config.embed_dim,
            moe.num_experts,
            SpatialExperts(config.max_tokens, expert_ids, weight_bound(config), moe.spatial_bias_init),
        )
        self.token_moe = TokenMoE(
            BalancedRouter(config.embed_dim, moe.num_experts, moe.centroid_init_gain),
            FeedForwardExperts(config.embed_dim, config.ffn_dim, expert_ids, config.activation),
            name=f"layer {layer_index} (tMoE)",
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        x_BnH = x_BnH + self.dropout(self.feature_moe(x_BnH, context))
        update_BnH, aux_losses = self.token_moe(x_BnH, context)
        return x_BnH + self.dropout(update_BnH), aux_losses


def weight_bound(config: ModelConfig) -> float:
    """Spatial weights start as U(-bound, bound)."""
    return config.spatial_init_scale / config.max_tokens


def _xavier_linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
