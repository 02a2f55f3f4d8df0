"""Parameters and work of the parts of blocks, by formula; needs no torch. :mod:`smlp.costs.formula` has the
convention.

Letters: ``T`` context, ``n`` tokens of an input (n <= T), ``H``, ``F``, ``E`` experts of which each token is due ``k``,
``P`` prefix.
"""

from __future__ import annotations

from collections.abc import Iterator

from smlp.config import ModelConfig
from smlp.costs.component import NORMS, PROJECTIONS, ROUTER, SCORES, SPATIAL, Component

LAYER_NORM_FLOPS = 5

ATTENTION = "self-attention"
FEED_FORWARD = "feed-forward"
GATED_MLP = "gMLP block"
SPATIAL_GATING = "spatial gating"
FEATURE_MOE = "sMoE"
TOKEN_EXPERTS = "tMoE experts"
GATED_MLP_EXPERTS = "gMLP experts"


def linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer; its multiply-adds are ``inputs * outputs``."""
    return inputs * outputs + outputs


def feed_forward(config: ModelConfig, layer: int) -> Component:
    """A norm, then F wide; the module is the block itself."""
    H, F = config.embed_dim, config.ffn_dim
    return Component(
        f"blocks.{layer}",
        layer,
        FEED_FORWARD,
        other_params=2 * H + linear(H, F) + linear(F, H),
        work={NORMS: LAYER_NORM_FLOPS * H, PROJECTIONS: 2 * H * F},
    )


def gated_mlp(config: ModelConfig, layer: int, n: int) -> Iterator[Component]:
    """A gMLP block and its spatial gating unit."""
    H, F, T = config.embed_dim, config.ffn_dim, config.max_tokens
    name, half = f"blocks.{layer}", F // 2
    yield Component(
        name,
        layer,
        GATED_MLP,
        other_params=2 * H + linear(H, F) + linear(half, H),
        work={NORMS: LAYER_NORM_FLOPS * H, PROJECTIONS: H * F + half * H},
    )
    yield Component(
        f"{name}.gating",
        layer,
        SPATIAL_GATING,
        other_params=2 * half + config.num_heads * (T * T + T),
        work={NORMS: LAYER_NORM_FLOPS * half, SPATIAL: n * half},
        num_mixed=n,
    )


def router(config: ModelConfig, layer: int) -> Iterator[Component]:
    """Nothing for a router that has nothing to learn and computes nothing."""
    kind = config.router_kind
    num_parameters, flops = kind.num_parameters(config), kind.flops_per_token(config)
    if num_parameters or flops:
        name = f"blocks.{layer}.token_moe.router"
        yield Component(name, layer, ROUTER, other_params=num_parameters, work={ROUTER: flops})


def gated_mlp_experts(config: ModelConfig, layer: int) -> Component:
    """gMLP layers as experts of tokens."""
    H, F, T = config.embed_dim, config.ffn_dim, config.max_tokens
    E, half = config.moe.num_experts, F // 2
    return Component(
        f"blocks.{layer}",
        layer,
        GATED_MLP_EXPERTS,
        expert_params=2 * H + linear(H, F) + 2 * half + T * T + T + linear(half, H),
        num_experts=E,
        flops_per_assignment=LAYER_NORM_FLOPS * (H + half) + H * F + half * H,
        assignments_per_token=min(config.experts_per_token, E),
        flops_per_pair=half,
    )


def token_experts(config: ModelConfig, layer: int) -> Component:
    """Feed-forward networks as experts of tokens, with a norm each (as in BASE) or one for all."""
    H, F, E = config.embed_dim, config.ffn_dim, config.moe.num_experts
    own_norm = config.router_kind.experts_as_in_base
    return Component(
        f"blocks.{layer}",
        layer,
        TOKEN_EXPERTS,
        expert_params=own_norm * 2 * H + linear(H, F) + linear(F, H),
        num_experts=E,
        other_params=(not own_norm) * 2 * H,
        work={} if own_norm else {NORMS: LAYER_NORM_FLOPS * H},
        flops_per_assignment=own_norm * LAYER_NORM_FLOPS * H + 2 * H * F,
        assignments_per_token=min(config.experts_per_token, E),
    )


def attention(config: ModelConfig, layer: int, n: int) -> Component:
    """Projections of queries, keys, values and output; n scores and n values of width H for each query."""
    H = config.embed_dim
    return Component(
        f"blocks.{layer}.mixing",
        layer,
        ATTENTION,
        other_params=2 * H + linear(H, 3 * H) + linear(H, H),
        work={NORMS: LAYER_NORM_FLOPS * H, PROJECTIONS: 4 * H * H, SCORES: 2 * n * H},
        num_mixed=n,
    )


def feature_moe(config: ModelConfig, layer: int, n: int) -> Component:
    """Two norms, the router's scores once for each sequence, and experts over the positions after the prefix."""
    H, E, P = config.embed_dim, config.moe.num_experts, config.prefix_tokens
    width = config.max_tokens - P
    read = {"deterministic": 0, "partial": P, "leaky": config.max_tokens}[config.moe.feature_routing]
    # a sequence that is all prefix passes through unrouted
    routing = H * min(n, read) * E / n if n > P else 0
    return Component(
        f"blocks.{layer}.mixing",
        layer,
        FEATURE_MOE,
        expert_params=width * width + width,
        num_experts=E,
        other_params=4 * H + read * E,
        work={NORMS: 2 * LAYER_NORM_FLOPS * H, SPATIAL: max(n - P, 0) ** 2 * H / n, ROUTER: routing},
        num_mixed=max(n - P, 0),
    )
