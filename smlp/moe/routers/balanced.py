"""BASE routing: balanced assignment in training, the best expert for each token in evaluation.

Source: Lewis et al., 2021, and Yu et al., 2022, section 3.1 (tMoE).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.settings import require
from smlp.moe.plan import RoutingPlan, random_table
from smlp.moe.routers.offsets import ExpertOffsets
from smlp.moe.routers.routing import Routing, ScoredRouterKind, TrainedRouter, register_router
from smlp.ops import balanced_assignment
from smlp.ops.assignment import check_no_nan
from smlp.parallel.spans import ASSIGNMENT, stage


def balanced_plan(logits_NE: Tensor, order_N: Tensor | None = None) -> RoutingPlan:
    """Return a plan of equal loads with a nearly maximal sum of logits. It weighs all tokens: for training only.

    Args:
        logits_NE: (N, E).
        order_N: a permutation in which the tokens are handed to the assignment; it only breaks ties.
    """
    if order_N is None:
        expert_N = balanced_assignment(logits_NE)
    else:
        expert_N = torch.empty_like(order_N)
        expert_N[order_N] = balanced_assignment(logits_NE[order_N])
    return RoutingPlan.from_experts(expert_N, logits_NE.size(1))


class BalancedRouter(TrainedRouter):
    """Affinity = token . centroid; weight = sigmoid(affinity). Computed in float32.

    Args:
        embed_dim: H.
        num_experts: E, over all ranks; every rank holds all centroids.
        init_gain: gain of the centroids' orthogonal initialisation.
        shuffle: in training, assign the tokens in random order.
        freeze_after: as in :class:`TrainedRouter`.
        weighs: False for weights of one. The centroids then get a gradient of zeros.
        offset_rate: step of the offsets that evaluation adds to the affinities; 0 for none.
        warmup: share of the training, at its beginning, in which ``table_V`` routes.
        table_V: an expert for each id, (V,); only for a warm-up.
    """

    #: 1 as long as the table routes, in evaluation too: a checkpoint is evaluated as it was trained
    warming: Tensor
    table: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_experts: int,
        init_gain: float,
        shuffle: bool = False,
        freeze_after: float = 1.0,
        weighs: bool = True,
        offset_rate: float = 0.0,
        warmup: float = 0.0,
        table_V: Tensor | None = None,
    ) -> None:
        super().__init__(freeze_after)
        self.shuffle, self.weighs, self.warmup = shuffle, weighs, warmup
        centroids = torch.empty(num_experts, embed_dim)
        if not centroids.is_meta:
            # torch cannot make an orthogonal matrix in half precision, which may be the default dtype
            precise = torch.promote_types(centroids.dtype, torch.float32)
            centroids.copy_(nn.init.orthogonal_(centroids.to(precise), gain=init_gain))
        self.centroids = nn.Parameter(centroids)
        self.offsets = ExpertOffsets(num_experts, offset_rate, by_sign=False) if offset_rate else None
        if table_V is not None:
            self.register_buffer("warming", torch.ones((), dtype=torch.long))
            self.register_buffer("table", table_V.to(torch.get_default_device()))

    def follow(self, progress: float) -> None:
        """Freeze, and end the warm-up, when the time has come."""
        super().follow(progress)
        if self.warmup:
            self.warming.fill_(int(progress < self.warmup))

    def forward(self, x_NH: Tensor, token_ids_N: Tensor | None, plan: RoutingPlan | None = None) -> Routing:
        """Route tokens (N, H); with ``plan`` given, only compute the weights, for that plan."""
        logits_NE = self.scores(x_NH, self.centroids)
        order_N = None
        if self.shuffle and self.training:
            order_N = torch.randperm(x_NH.size(0), device=x_NH.device)
        if plan is None:
            with torch.no_grad(), stage(ASSIGNMENT):
                plan = self._decide(logits_NE, token_ids_N, order_N)
        affinity_A = logits_NE[plan.token_A, plan.expert_A]
        weight_A = affinity_A.sigmoid() if self.weighs else 1 + 0 * affinity_A
        return Routing(plan, weight_A, logits_NE=logits_NE.detach())

    def _decide(self, logits_NE: Tensor, token_ids_N: Tensor | None, order_N: Tensor | None) -> RoutingPlan:
        if self.offsets is not None and self.training:
            self.offsets.count(self.offsets(logits_NE).argmax(dim=1), logits_NE)
        is_exported = torch.compiler.is_exporting()  # to a graph that cannot branch on the value of ``warming``
        if not is_exported and self._is_warming:
            assert token_ids_N is not None
            return RoutingPlan.from_experts(self.table[token_ids_N], logits_NE.size(1))
        if self.training:
            return balanced_plan(logits_NE, order_N)
        check_no_nan(logits_NE)
        expert_N = (logits_NE if self.offsets is None else self.offsets(logits_NE)).argmax(dim=1)
        if is_exported and self.warmup:
            expert_N = torch.where(self.warming > 0, self.table[token_ids_N], expert_N)
        return RoutingPlan.from_experts(expert_N, logits_NE.size(1))

    @property
    def _is_warming(self) -> bool:
        return self.warmup > 0 and bool(self.warming)

    def looks_ahead(self) -> bool:
        """Return True in training, unless in a warm-up: the assignment weighs all tokens of the batch."""
        return self.training and not self._is_warming


@register_router("base")
class Base(ScoredRouterKind):
    """Balanced assignment (Lewis et al., 2021; Yu et al., 2022, section 3.1)."""

    takes = (
        *("centroid_init_gain", "base_shuffle", "base_gate", "base_warmup", "base_offset_rate", "router_freeze"),
        *("hash_seed", "hash_tables"),
    )
    experts_as_in_base = True
    title = "BASE"

    def check(self, config: ModelConfig) -> None:
        require(
            not (config.base_shuffle and config.base_warmup),
            f"base_warmup={config.base_warmup} routes by token ids, which base_shuffle does not send to other ranks "
            "with the tokens: give one of the two",
        )

    def build(self, config: ModelConfig) -> BalancedRouter:
        table_V = None
        if config.base_warmup:
            table_V = random_table(config.vocab_size, config.num_experts, config.hash_seed)
        return BalancedRouter(
            config.embed_dim,
            config.num_experts,
            config.centroid_init_gain,
            config.base_shuffle,
            config.router_freeze,
            config.base_gate == "sigmoid",
            config.base_offset_rate,
            config.base_warmup,
            table_V,
        )

    def activations_per_position(self, config: ModelConfig) -> float:
        return 2 * config.embed_dim  # the routed inputs, and the outputs that weights multiply

    def mixes_ranks(self, config: ModelConfig) -> bool:
        return config.base_shuffle

    def affinities(self, config: ModelConfig, logits_NE: Tensor) -> Tensor:
        return logits_NE.sigmoid()
