"""BASE routing: balanced assignment in training, the best expert for each token in evaluation.

Source: Lewis et al., 2021, and smlp.txt section 3.1 (tMoE).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers.routing import Routing, ScoredRouterKind, gate_logits, register_router
from smlp.ops import balanced_assignment
from smlp.ops.assignment import check_no_nan
from smlp.parallel.spans import ASSIGNMENT, stage


def balanced_plan(logits_NE: Tensor, order_N: Tensor | None = None) -> RoutingPlan:
    """Return a plan of equal loads with a nearly maximal sum of logits. It weighs all tokens: for training only.

    Args:
        logits_NE: (N, E).
        order_N: a permutation in which the tokens are handed to the assignment; it decides between equals only.
    """
    if order_N is None:
        expert_N = balanced_assignment(logits_NE)
    else:
        expert_N = torch.empty_like(order_N)
        expert_N[order_N] = balanced_assignment(logits_NE[order_N])
    return RoutingPlan.from_experts(expert_N, logits_NE.size(1))


def greedy_plan(logits_NE: Tensor) -> RoutingPlan:
    """Return the plan of the best expert for each token by itself: none is dropped, none depends on another."""
    check_no_nan(logits_NE)
    return RoutingPlan.from_experts(logits_NE.argmax(dim=1), logits_NE.size(1))


class BalancedRouter(nn.Module):
    """Affinity = token . centroid; weight = sigmoid(affinity). Computed in float32.

    Args:
        embed_dim: H.
        num_experts: E, over all ranks; every rank holds all centroids.
        init_gain: gain of the centroids' orthogonal initialisation.
        shuffle: in training, assign the tokens in random order.
    """

    def __init__(self, embed_dim: int, num_experts: int, init_gain: float, shuffle: bool = False) -> None:
        super().__init__()
        self.shuffle = shuffle
        centroids = torch.empty(num_experts, embed_dim)
        if not centroids.is_meta:
            # torch cannot make an orthogonal matrix in half precision, which may be the default dtype
            precise = torch.promote_types(centroids.dtype, torch.float32)
            centroids.copy_(nn.init.orthogonal_(centroids.to(precise), gain=init_gain))
        self.centroids = nn.Parameter(centroids)

    def forward(self, x_NH: Tensor, token_ids_N: Tensor | None, plan: RoutingPlan | None = None) -> Routing:
        """Route tokens (N, H); with ``plan`` given, only compute the weights, for that plan."""
        logits_NE = gate_logits(x_NH, self.centroids)
        order_N = None
        if self.shuffle and self.training:
            order_N = torch.randperm(x_NH.size(0), device=x_NH.device)
        if plan is None:
            with torch.no_grad(), stage(ASSIGNMENT):
                plan = balanced_plan(logits_NE, order_N) if self.training else greedy_plan(logits_NE)
        return Routing(plan, logits_NE[plan.token_A, plan.expert_A].sigmoid(), logits_NE=logits_NE.detach())

    def looks_ahead(self) -> bool:
        """Return True in training: the assignment weighs all tokens of the batch."""
        return self.training


@register_router("base")
class Base(ScoredRouterKind):
    """Balanced assignment (Lewis et al., 2021; smlp.txt, section 3.1)."""

    takes = ("centroid_init_gain", "base_shuffle")
    experts_as_in_base = True
    title = "BASE"

    def build(self, config: ModelConfig) -> BalancedRouter:
        return BalancedRouter(config.embed_dim, config.num_experts, config.centroid_init_gain, config.base_shuffle)

    def activations_per_position(self, config: ModelConfig) -> float:
        return 2 * config.embed_dim  # the routed inputs, and the outputs that weights multiply

    def mixes_ranks(self, config: ModelConfig) -> bool:
        return config.base_shuffle

    def affinities(self, logits_NE: Tensor) -> Tensor:
        return logits_NE.sigmoid()
