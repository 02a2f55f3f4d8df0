"""Top-1 routing that is balanced without an auxiliary loss: a bias for each expert affects the choice alone.

Source: Wang et al., 2024 (arXiv 2408.15664), algorithm 1, as in DeepSeek-V3.

Letters: ``N`` tokens, ``H`` features, ``E`` experts, ``A`` = N assignments.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers.offsets import ExpertOffsets
from smlp.moe.routers.routing import Routing, ScoredRouterKind, TrainedRouter, register_router
from smlp.ops.assignment import check_no_nan
from smlp.parallel.spans import ASSIGNMENT, stage


class LossFreeRouter(TrainedRouter):
    """Gate in float32; each token goes to the best expert of gate plus bias; weight = gate without bias.

    No token is dropped. The bias is an :class:`ExpertOffsets` by sign: it moves once an update, and not where the
    router is frozen.

    Args:
        embed_dim: H.
        num_experts: E, over all ranks; every rank holds the whole gate.
        rate: step of a bias in an update.
        by_sigmoid: whether the gate is the sigmoid of the scores instead of their softmax.
        freeze_after: as in :class:`TrainedRouter`.
    """

    def __init__(
        self, embed_dim: int, num_experts: int, rate: float, by_sigmoid: bool = True, freeze_after: float = 1.0
    ) -> None:
        super().__init__(freeze_after)
        self.by_sigmoid = by_sigmoid
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dim))
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -(embed_dim**-0.5), embed_dim**-0.5)
        self.bias = ExpertOffsets(num_experts, rate, by_sign=True)

    def forward(self, x_NH: Tensor, token_ids_N: Tensor | None, plan: RoutingPlan | None = None) -> Routing:
        """Route tokens (N, H); see :class:`smlp.moe.routers.Router`."""
        logits_NE = self.scores(x_NH, self.weight)
        gate_NE = logits_NE.sigmoid() if self.by_sigmoid else logits_NE.softmax(dim=1)
        if plan is None:
            with torch.no_grad(), stage(ASSIGNMENT):
                check_no_nan(logits_NE)
                expert_N = self.bias(gate_NE).argmax(dim=1)
                if self.training and not self.is_frozen:
                    self.bias.count(expert_N, gate_NE)
                plan = RoutingPlan.from_experts(expert_N, gate_NE.size(1))
        return Routing(plan, gate_NE[plan.token_A, plan.expert_A], logits_NE=logits_NE.detach())

    def looks_ahead(self) -> bool:
        """Return False: the bias is constant within an update."""
        return False


@register_router("loss_free")
class LossFree(ScoredRouterKind):
    """The best expert by a gate whose biases even out the loads (Wang et al., 2024)."""

    takes: ClassVar[tuple[str, ...]] = ("loss_free_rate", "loss_free_gate", "router_freeze")
    title = "Loss-free"

    def affinities(self, config: ModelConfig, logits_NE: Tensor) -> Tensor:
        return logits_NE.sigmoid() if config.loss_free_gate == "sigmoid" else super().affinities(config, logits_NE)

    def build(self, config: ModelConfig) -> LossFreeRouter:
        by_sigmoid = config.loss_free_gate == "sigmoid"
        return LossFreeRouter(
            config.embed_dim, config.num_experts, config.loss_free_rate, by_sigmoid, config.router_freeze
        )
