"""Experts: stacked weights of the experts that live on this rank, each named by its global id.

Every expert draws its initial values from a generator of its own, seeded from the layer's seed and its global id, so
that they do not depend on the rank on which it lives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from smlp.ops import causal_spatial_projection, expert_feed_forward


def init_each_expert(
    weight: nn.Parameter, expert_ids: Sequence[int], init: Callable[[Tensor, torch.Generator], None]
) -> None:
    """Calls ``init(row, generator)`` on the row of each expert; draws one number from the global generator."""
    layer_seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    if weight.is_meta:
        return
    with torch.no_grad():
        for row, expert_id in enumerate(expert_ids):
            generator = torch.Generator().manual_seed((layer_seed + expert_id * 0x9E3779B97F4A7C15) % 2**63)
            init(weight[row], generator)


def uniform_experts(expert_ids: Sequence[int], *shape: int, bound: float) -> nn.Parameter:
    """Weights (e, ...) from U(-bound, bound), drawn on the CPU so that the values are the same on every device."""
    weight = nn.Parameter(torch.empty(len(expert_ids), *shape))

    def init(row: Tensor, generator: torch.Generator) -> None:
        row.copy_(torch.empty(row.shape, device="cpu").uniform_(-bound, bound, generator=generator))

    init_each_expert(weight, expert_ids, init)
    return weight


def xavier_bound(fan_in: int, fan_out: int) -> float:
    """Xavier's uniform bound, for one expert at a time."""
    return math.sqrt(6.0 / (fan_in + fan_out))


class FeedForwardExperts(nn.Module):
    """Feed-forward experts: ``w2 act(w1 x + b1) + b2``.

    Those of BASE and of sMLP's tMoE have a layer norm of their own each, and ``w2`` starts at zero, so that the layer
    starts as the identity (Lewis et al., 2021; smlp.txt section 3.1). Those of the other routers start with Xavier's
    values, as a dense feed-forward network does.

    Args:
        embed_dim, ffn_dim: H, F.
        expert_ids: global ids of the experts on this rank.
        activation: "gelu", "relu" or "swish".
        as_in_base: with own norms and ``w2 = 0``.
    """

    def __init__(
        self, embed_dim: int, ffn_dim: int, expert_ids: Sequence[int], activation: str, as_in_base: bool = True
    ) -> None:
        super().__init__()
        num_local, bound = len(expert_ids), xavier_bound(embed_dim, ffn_dim)
        self.expert_ids = tuple(expert_ids)
        self.activation = activation
        self.norm_weight = nn.Parameter(torch.ones(num_local, embed_dim)) if as_in_base else None
        self.norm_bias = nn.Parameter(torch.zeros(num_local, embed_dim)) if as_in_base else None
        self.w1 = uniform_experts(expert_ids, ffn_dim, embed_dim, bound=bound)
        self.b1 = nn.Parameter(torch.zeros(num_local, ffn_dim))
        if as_in_base:
            self.w2 = nn.Parameter(torch.zeros(num_local, embed_dim, ffn_dim))
        else:
            self.w2 = uniform_experts(expert_ids, embed_dim, ffn_dim, bound=bound)
        self.b2 = nn.Parameter(torch.zeros(num_local, embed_dim))

    def forward(self, x_AH: Tensor, counts: Sequence[int]) -> Tensor:
        """(A, H), sorted by expert with ``counts`` tokens each, to (A, H)."""
        norm = None if self.norm_weight is None else (self.norm_weight, self.norm_bias)
        return expert_feed_forward(x_AH, counts, norm, self.w1, self.b1, self.w2, self.b2, self.activation)


class SpatialExperts(nn.Module):
    """Spatial projections: one T x T matrix and one bias of length T for each expert or head.

    Args:
        max_tokens: T.
        expert_ids: global ids of the experts on this rank; for a spatial gating unit, the heads.
        weight_bound: weights start as U(-bound, bound), near zero.
        bias_init: initial value of every bias.
    """

    def __init__(self, max_tokens: int, expert_ids: Sequence[int], weight_bound: float, bias_init: float) -> None:
        super().__init__()
        self.expert_ids = tuple(expert_ids)
        self.max_tokens = max_tokens
        self.weight = uniform_experts(expert_ids, max_tokens, max_tokens, bound=weight_bound)
        self.bias = nn.Parameter(torch.full((len(expert_ids), max_tokens), float(bias_init)))

    def forward(self, x_Bnec: Tensor, start: int = 0, gate_Bmec: Tensor | None = None) -> Tensor:
        """(B, n, e, c) to (B, n - start, e, c): chunk i through expert i, at positions start .. n-1, times the gate."""
        return causal_spatial_projection(x_Bnec, self.weight, self.bias, start, gate_Bmec)
